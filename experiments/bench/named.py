"""Schemes as the command line names them, and attention with one.

For instance `t5,shaw:clip=16:values=false,mypkg.mine:Own`.
"""

import ast
import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.schemes import sized_scheme

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
SCHEMES_HELP = "names with commas between; options after colons, as in shaw:clip=16:values=false"


def named_schemes(words: str, sizes: Mapping[str, int]) -> dict[str, pe.Scheme]:
    """Returns schemes by what they were called, `none` first.

    Args:
      words: names with commas between, each with options if need be.
      sizes: of the model, by the names in `experiments.schemes.VOCABULARY`.

    Raises:
      ConfigError: for unknown schemes and options, and for values that a scheme refuses.

    >>> named_schemes("alibi,t5:num_buckets=16", {"num_heads": 4})["t5:num_buckets=16"].num_buckets
    16
    """
    out = {"none": pe.NoPE()}
    for word in re.split(r",(?![^(\[]*[)\]])", words):  # A comma in brackets is a value's.
        first, *rest = word.split(":")
        name = ":".join([first, *(part for part in rest if "=" not in part)])
        table: dict[str, Any] = {}
        for part in rest:
            option, equals, value = part.partition("=")
            if equals:
                table[option] = _value(value)
        out[word] = sized_scheme(name, sizes, {name: table}, "the benchmark")
    return out


def sizes_of(heads: int, dim: int, length: int) -> dict[str, int]:
    """Returns the sizes that schemes may ask for."""
    return {"num_heads": heads, "head_dim": dim, "model_dim": heads * dim, "max_length": length}


def attend_with(scheme: pe.Scheme, **where: jax.Array) -> Callable:
    """Returns causal attention with a scheme, of what `make_arguments` returns.

    The logit scale is the same for all, so that they differ in positions alone: where tokens
    are, as `scheme_attention` is told. The compiler is not told.
    """

    def attend(q, k, v, params, x=None):
        options: dict[str, Any] = {"is_causal": True, "implementation": "xla"}
        options |= jax.lax.optimization_barrier(where)
        scale = q.shape[-1] ** -0.5
        return pe.scheme_attention(scheme, params, q, k, v, x=x, scale=scale, **options)[0]

    return attend


def places(length: int) -> dict[str, dict[str, jax.Array]]:
    """Returns where tokens may be, by name, as arguments of `attend_with`.

    >>> {name: sorted(where) for name, where in places(8).items()}
    {'in order': ['positions'], 'shuffled': ['positions'], '4 texts': ['positions', 'segment_ids']}
    """
    slots = jnp.arange(length, dtype=jnp.int32)[None]
    text = -(-length // 4)
    shuffled = jnp.lexsort((jax.random.uniform(jax.random.key(0), (length,)), slots[0] // 64))
    return {
        "in order": {"positions": slots},
        "shuffled": {"positions": shuffled.astype(jnp.int32)[None]},
        "4 texts": {"positions": slots % text, "segment_ids": slots // text},
    }


def make_arguments(scheme: pe.Scheme, shape: tuple[int, int, int, int], dtype: Any) -> tuple:
    """Returns q, k, v of a shape [B, T, N, H], parameters, and x where the scheme reads it."""
    keys = jax.random.split(jax.random.key(0), 5)
    q, k, v = (jax.random.normal(key, shape, dtype) for key in keys[:3])
    params = scheme.init(keys[3])
    if not scheme.traits.reads_x:
        return q, k, v, params
    x = jax.random.normal(keys[4], (*shape[:2], shape[2] * shape[3]), dtype)
    return q, k, v, params, x


def whole_numbers(text: str) -> tuple[int, ...]:
    """Returns the numbers between commas, in ascending order."""
    return tuple(sorted(int(part) for part in text.split(",")))


def _value(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text
