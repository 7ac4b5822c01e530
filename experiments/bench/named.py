"""Schemes as the command line names them: `t5,shaw:clip=16:values=false,mypkg.mine:Own`."""

import ast
import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.schemes import sized_scheme

HELP = "names with commas between; options after colons, as in shaw:clip=16:values=false"


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


def reads_x(scheme: pe.Scheme, q: jax.Array) -> bool:
    """Returns whether a scheme needs what q and k were projected from, for q [B, T, N, H]."""
    params = jax.eval_shape(scheme.init, jax.random.key(0))
    at = jax.ShapeDtypeStruct(q.shape[:2], jnp.int32)
    try:
        jax.eval_shape(lambda p, q, at: scheme.side(p, None, q, q, at, None), params, q, at)
    except (AttributeError, TypeError, ValueError):
        return True
    return False


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
