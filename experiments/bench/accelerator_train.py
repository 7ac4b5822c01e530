"""Times of training steps on the device: a part of `accelerator`.

A decoder of 25 million parameters takes steps of AdamW: 8 layers of width 512 with 8 heads, 16 rows
of 2,048 random tokens, whole, or packed from documents of some 300. The kernels are named, so that
a chip without a row in `posenc_jax.engine.chips` runs them too; `default` is `None`, without a
scheme. Rows are as in `accelerator_times`, and written as they are measured. On a CPU sizes are
tiny, and tiles are timed. It needs flax and optax.
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import posenc_jax as pe
import posenc_jax.nnx as pnnx
from experiments.bench.accelerator_times import SCHEMES, Call, Job, Sizes, Times, scheme_of
from experiments.bench.peers import compile_program


class Decoder(NamedTuple):
    """Sizes: layers, D, N, vocabulary, B, T, and the mean length of documents."""

    layers: int = 8
    width: int = 512
    heads: int = 8
    vocabulary: int = 4096
    batch: int = 16
    length: int = 2048
    document: int = 300


DRY = Decoder(2, 32, 2, 64, 2, 64, 20)


class Block(nnx.Module):
    """A layer before which its input is normalized: attention, and two products with GELU."""

    def __init__(self, sizes: Decoder, scheme: pe.Scheme, by: str | None, rngs: nnx.Rngs):
        linear = functools.partial(nnx.Linear, dtype=jnp.bfloat16, use_bias=False, rngs=rngs)
        norm = functools.partial(nnx.RMSNorm, sizes.width, dtype=jnp.bfloat16, rngs=rngs)
        self.norms = nnx.List([norm(), norm()])
        self.attention = pnnx.Attention(
            sizes.width,
            sizes.heads,
            position=scheme,
            is_causal=True,
            dtype=jnp.bfloat16,
            implementation=by,
            rngs=rngs,
        )
        self.wide = linear(sizes.width, 4 * sizes.width)
        self.narrow = linear(4 * sizes.width, sizes.width)

    def __call__(self, x: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        x = x + self.attention(self.norms[0](x), segment_ids=segment_ids)
        return x + self.narrow(jax.nn.gelu(self.wide(self.norms[1](x))))


def step_of(sizes: Decoder, scheme: pe.Scheme, by: str | None) -> tuple[Callable, Callable]:
    """Returns functions that make a state, and that take a step from it: `step(state, *data)`."""

    def make(key: jax.Array) -> nnx.State:
        return nnx.state(Block(sizes, scheme, by, nnx.Rngs(key)))

    graph = nnx.graphdef(nnx.eval_shape(lambda: Block(sizes, scheme, by, nnx.Rngs(0))))
    optimizer = optax.adamw(1e-3)

    def new_state() -> Any:
        embedding = jax.random.normal(jax.random.key(1), (sizes.vocabulary, sizes.width))
        layers = jax.vmap(make)(jax.random.split(jax.random.key(0), sizes.layers))
        params = {"embedding": 0.02 * embedding, "layers": layers}
        return params, optimizer.init(params)

    def loss(params: Any, tokens: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
        def layer(x, block):
            return nnx.merge(graph, block)(x, segment_ids), None

        table = params["embedding"].astype(jnp.bfloat16)
        x, _ = jax.lax.scan(layer, table[tokens], params["layers"])
        logits = jnp.einsum("btd,vd->btv", x, table).astype(jnp.float32)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits[:, :-1], tokens[:, 1:])
        return losses.mean()

    def step(state: Any, tokens: jax.Array, segment_ids: jax.Array | None) -> Any:
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, tokens, segment_ids)
        updates, moments = optimizer.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return new_state, step


def job(sizes: Decoder, name: str, by: str, packed: bool) -> Job:
    """Returns the step of a scheme by an implementation."""
    what = "training step, packed" if packed else "training step"

    def prepare() -> tuple[Call, dict[str, Any]]:
        random = np.random.default_rng(0)
        shape = sizes.batch, sizes.length
        tokens = jnp.asarray(random.integers(sizes.vocabulary, size=shape), jnp.int32)
        starts = random.random(shape) < 1 / sizes.document
        segment_ids = jnp.asarray(np.cumsum(starts, axis=1), jnp.int32) if packed else None
        scheme = scheme_of(name, (*shape, sizes.heads, sizes.heads, sizes.width // sizes.heads))
        new_state, step = step_of(sizes, scheme, None if by == "default" else by)
        state = jax.jit(new_state)()
        program, figures = compile_program(step, (state, tokens, segment_ids), donate_argnums=0)

        def call() -> jax.Array:
            nonlocal state
            state, value = program(state, tokens, segment_ids)
            return value

        return call, figures

    weights = sizes.layers * 12 * sizes.width**2 + sizes.vocabulary * sizes.width
    attention = sizes.layers * sizes.length * sizes.width  # Of a token: two products by T / 2 keys.
    flop = 6.0 * (weights + attention) * sizes.batch * sizes.length
    return Job({"name": name, "by": by, "what": what, "T": sizes.length, "flop": flop}, prepare)


def main(arguments: list[str]) -> int:
    """Measures everything that the time allows."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="the rows")
    add("--seconds", type=float, default=140.0, help="(default: 140)")
    add("--schemes", nargs="+", default=["none", "rope", *SCHEMES[1:]], metavar="NAME")
    options = parser.parse_args(arguments)
    dry = jax.default_backend() == "cpu"
    sizes, by = (DRY, "xla") if dry else (Decoder(), "pallas")
    rounds = Sizes(rounds=2, seconds=1e-3) if dry else Sizes(rounds=10, seconds=0.2)
    times = Times(options.json, options.seconds, rounds, threads=8)
    whole = [job(sizes, name, by, False) for name in options.schemes]
    packed = [job(sizes, name, by, True) for name in options.schemes]
    for jobs in ([job(sizes, "none", "default", False), *whole], packed)[times.groups :]:
        times.measure(jobs)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
