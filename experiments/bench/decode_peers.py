"""Attention to a cache by `jax.nn`, for `decode`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.bench import peers
from experiments.bench.compile import compile_program


def jax_nn(arguments: tuple, tokens: int) -> dict[str, peers.Case]:
    """Returns `jax.nn` on a cache [B, S, N, H], without a bias and with T5's as rows."""
    q, k, v, params = arguments
    slots = q.shape[1]
    start = jnp.int32(slots - tokens)
    new = tuple(y[:, slots - tokens :] for y in (q, k, v))

    def write(cache, new, start):
        return jax.lax.dynamic_update_slice_in_dim(cache, new, start, 1)

    def case(like: str, bias_of: Callable) -> peers.Case:
        def step(cache, start, table, q, k, v):
            keys, values = write(cache[0], k, start), write(cache[1], v, start)
            distance = (start + jnp.arange(tokens, dtype=jnp.int32))[:, None] - jnp.arange(
                slots, dtype=jnp.int32
            )[None]
            out = jax.nn.dot_product_attention(
                q, keys, values, bias=bias_of(table, distance), mask=(distance >= 0)[None, None]
            )
            return out, (keys, values)

        cache = tuple(y.at[:, slots - tokens :].set(0) for y in (k, v))
        inputs = start, params["table"], *new
        program, facts = compile_program(step, (cache, *inputs), donate_argnums=0)

        def call():
            nonlocal cache
            out, cache = program(cache, *inputs)
            return out

        return peers.Case(call, facts, like)

    def t5(table, distance):
        return jnp.moveaxis(table.T[pe.t5_bucket(distance)], -1, 0)[None].astype(q.dtype)

    return {
        "jax.nn without bias": case("none", lambda table, distance: None),
        "jax.nn with T5 rows": case("t5", t5),
    }
