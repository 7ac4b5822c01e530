"""Schemes named on the command line, and attention with a scheme.

For instance `t5,shaw:clip=16:values=false,mypkg.mine:Own`.
"""

import argparse
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import posenc_jax as pe

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def named_schemes(words: str, sizes: Mapping[str, int]) -> dict[str, pe.Scheme]:
    """Returns schemes by name and options, `none` first.

    Args:
      words: names with commas between; options follow a name after colons.
      sizes: of the model, by the names in `experiments.models.schemes.SIZES`.

    Raises:
      ConfigError: for unknown schemes and options, and for values that a scheme refuses.

    >>> named_schemes("alibi,t5:num_buckets=16", {"num_heads": 4})["t5:num_buckets=16"].num_buckets
    16
    """
    # `accelerator` runs without the libraries that these import.
    from experiments.models.schemes import build
    from experiments.settings.config_io import literal

    out: dict[str, pe.Scheme] = {"none": pe.NoPE()}
    for word in re.split(r",(?![^(\[]*[)\]])", words):  # A comma in brackets is a value's.
        word = word.strip()
        first, *parts = word.split(":")
        name = ":".join([first, *(part for part in parts if "=" not in part)])
        table: dict[str, Any] = {}
        for part in parts:
            option, equals, value = part.partition("=")
            if equals:
                table[option] = None if value == "none" else literal(value)
        scheme = build(name, sizes, {f"schemes.{name}": table}, "the benchmark")
        assert isinstance(scheme, pe.Scheme)  # No layers, as `num_layers` is not passed.
        out[word] = scheme
    return out


def sizes_of(heads: int, dim: int, length: int) -> dict[str, int]:
    """Returns the sizes that schemes may require."""
    return {
        "num_heads": heads,
        "head_dim": dim,
        "model_dim": heads * dim,
        "max_length": length,
        "trained_length": length,
    }


def attend_with(scheme: pe.Scheme, implementation: str | None = "xla") -> Callable:
    """Returns causal attention with a scheme, a function of the arrays of `make_arguments`.

    The logit scale is the same for all schemes.
    """

    def attend(q, k, v, params, x=None):
        options: dict[str, Any] = {"is_causal": True, "implementation": implementation}
        scale = q.shape[-1] ** -0.5
        return pe.scheme_attention(scheme, params, q, k, v, x=x, scale=scale, **options)[0]

    return attend


def make_arguments(scheme: pe.Scheme, shape: tuple[int, int, int, int], dtype: Any) -> tuple:
    """Returns q, k, v of a shape [B, T, N, H], parameters, and x if the scheme reads it."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, shape, dtype) for key in keys[:3])
    params = scheme.init(keys[3])
    if not scheme.traits.reads_x:
        return q, k, v, params
    x = jax.random.normal(keys[4], (*shape[:2], shape[2] * shape[3]), dtype)
    return q, k, v, params, x


def positive(text: str) -> int:
    """Returns a positive integer."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1, got {text!r}")
    return int(text)


def positives(text: str) -> tuple[int, ...]:
    """Returns the distinct integers between commas, in ascending order."""
    return tuple(sorted({positive(part) for part in text.split(",")}))


def add_common_arguments(
    parser: argparse.ArgumentParser,
    *,
    sizes: tuple[str, tuple[int, ...], str] | None = None,
    schemes: str = "",
    seconds: float | None = None,
) -> None:
    """Adds the settings that benchmarks share.

    Args:
      parser: of the benchmark.
      sizes: flag, default and meaning of the size that grows; adds the other sizes of attention.
      schemes: the default; empty for a benchmark without schemes.
      seconds: the default time beyond the rounds; None for a benchmark without times.
    """
    if sizes:
        flag, default, meaning = sizes
        words = f"{meaning}, commas between (default: {default[0]} to {default[-1]})"
        parser.add_argument(flag, type=positives, default=default, help=words)
        for name, size in (("--batch", 1), ("--heads", 8), ("--head-dim", 64)):
            parser.add_argument(name, type=positive, default=size, help=f"default: {size}")
        parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    if schemes:
        words = (
            "names with commas between; options after colons, as in shaw:clip=16:values=false "
            f"(default: {schemes})"
        )
        parser.add_argument("--schemes", default=schemes, help=words)
    if seconds is not None:
        parser.add_argument("--rounds", type=positive, default=15, help="rounds (default: 15)")
        words = f"continue for that long beyond the rounds (default: {seconds:g})"
        parser.add_argument("--seconds", type=float, default=seconds, help=words)
