"""Text and speed of a model that decodes from a cache."""

import functools
import time
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from examples.decoder import Decoder, jit_step

TIMED = 24


class Steps:
    """Greedy steps of a model, a program for each number of tokens and size of the cache."""

    def __init__(self, model: Decoder):
        self.model, self._step = model, jit_step(model)

    def write(self, prompt: list[int], count: int, slots: int) -> Iterator[int]:
        """Yields the `count` likeliest tokens after a prompt, one by one."""
        tokens, caches = prompt, self.model.new_caches(1, slots, tokens_per_call=len(prompt))
        for _ in range(count):
            logits, caches = self._step(jnp.array([tokens], jnp.int32), caches)
            tokens = [int(logits[0].argmax())]
            yield tokens[0]

    def seconds(self, slots: int) -> float:
        """Returns the median time of the steps that fill the last slots of a cache."""
        timed = min(TIMED, slots // 2)
        caches = filled(self.model.new_caches(1, slots, tokens_per_call=1), slots - timed - 1)
        tokens, times = jnp.zeros((1, 1), jnp.int32), []
        for _ in range(timed + 1):
            start = time.perf_counter()
            logits, caches = self._step(tokens, caches)
            logits.block_until_ready()
            times.append(time.perf_counter() - start)
        return float(np.median(times[1:]))  # The first compiles.


@functools.partial(jax.jit, static_argnums=1, donate_argnums=0)
def filled(caches: list[pe.KVCache], count: int) -> list[pe.KVCache]:
    """Returns caches after `count` tokens whose keys and values are zeros."""

    def fill(cache):
        new = min(count, cache.capacity)
        place = jnp.tile(jnp.arange(count - new, count, dtype=jnp.int32), (len(cache.k), 1))
        k, v = (jnp.zeros((*place.shape, *x.shape[2:]), x.dtype) for x in (cache.k, cache.v))
        return cache.append(k, v, place, jnp.zeros_like(place))

    return [fill(cache) for cache in caches]
