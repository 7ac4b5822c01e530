"""Wrong calls: the message names the function, the argument, and what was given."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx as fnnx

import posenc_jax as pe
from posenc_jax import nnx
from posenc_jax.engine.dense import Dense
from posenc_jax.engine.xla import XLA

Q, AT, ROPE = jnp.ones((1, 3, 2, 4)), jnp.arange(3), pe.RoPE(head_dim=4)
EMPTY = jnp.ones((1, 3, 2, 0))
SIZES = {"num_heads": 2, "head_dim": 4}


def same(score, b, h, q_idx, kv_idx):
    return score


def cache(batch=1, **options):
    return pe.new_cache(ROPE, batch, 4, **SIZES, **options)


CALLS = {
    "new_cache: coordinates must be an array or .*, got [1, 2]": lambda: cache(coordinates=[1, 2]),
    "new_cache: coordinates must be [T], .* got shape ()": lambda: cache(coordinates=AT[0]),
    "new_cache: batch must not be negative, got -1": lambda: cache(-1),
    "new_cache: value_dim must not be negative, got -2": lambda: cache(value_dim=-2),
    "attention: the head dim of q and k must be at least 1": lambda: pe.attention(EMPTY, EMPTY, Q),
    "Attention: head_dim must be >= 1, got 0": lambda: nnx.Attention(
        8, 2, head_dim=0, rngs=fnnx.Rngs(0)
    ),
    "score_mod: arrays must be arrays, got 'x'": lambda: pe.score_mod(same, Q, "x"),
    "XLA: forward must be Blocks(q, k) or None, got (32, 32)": lambda: XLA((32, 32)),
    "XLA: row_block must be >= 1, got 0": lambda: XLA(row_block=0),
    "Dense: block must be an integer, got 'x'": lambda: Dense("x"),
    "on_axis: axis must be one .*, got axis 'x' of 2": lambda: pe.on_axis(ROPE, "x"),
    "cos_sin: frequencies must be an array [..., P], got 1.0": lambda: pe.cos_sin(AT, 1.0),
    "cos_sin: frequencies must be an array [..., P], got array(1.": lambda: pe.cos_sin(
        AT, np.array(1.0)
    ),
}


@pytest.mark.parametrize("message", CALLS)
def test_a_wrong_call_is_named(message):
    pattern = "^" + ".*".join(map(re.escape, message.split(".*")))
    with pytest.raises((TypeError, ValueError), match=pattern):
        CALLS[message]()
