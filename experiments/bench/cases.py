"""Schemes by name, and attention with a scheme."""

import argparse
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import posenc_jax as pe

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}


def named_schemes(names: Iterable[str], sizes: Mapping[str, int]) -> dict[str, Any]:
    """Returns schemes, chains and objects of your own by name, `none` first.

    >>> list(named_schemes(["alibi", "rope+t5"], {"num_heads": 4, "head_dim": 8}))
    ['none', 'alibi', 'rope+t5']
    """
    # `accelerator` runs without the libraries that this imports.
    from experiments.models.schemes import build

    return {"none": pe.NoPE()} | {name: build(name, sizes, {}, "the benchmark") for name in names}


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
    """Returns causal attention with a scheme, a function of the arrays of `make_arguments`."""

    def attend(q, k, v, params, x=None):
        options: dict[str, Any] = {"is_causal": True, "implementation": implementation}
        return pe.scheme_attention(scheme, params, q, k, v, x=x, **options)[0]

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
