"""A training step of an NNX Llama with this library, against a rotation written by hand.

The three models have the same weights and give the same loss. "by hand" rotates q and k by cosines
and sines of `positions * theta ** (-2p / H)` and calls `jax.nn.dot_product_attention`. The others
have `posenc_jax.nnx.Attention(position=RoPE(...))`: one with `implementation="jax"`, which calls
the same function, and one with the default. A step is a loss, its gradients and an update by SGD.

Tracing and compiling are seconds of processor time of all threads, which other load disturbs less:
the least of several times from empty caches, the models in turns.
"""

import argparse
import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from experiments.bench.cases import add_common_arguments, positive, positives
from experiments.bench.timing import show, side_by_side
from posenc_jax.nnx import Attention

VOCABULARY, THETA = 512, 1e4


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama."""

    layers: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def model_dim(self) -> int:
        """D."""
        return self.heads * self.head_dim


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    parser.add_argument("--lengths", type=positives, default=(512, 2048), help="default: 512,2048")
    for name, size in (("layers", 4), ("heads", 8), ("kv-heads", 2), ("head-dim", 32)):
        parser.add_argument(f"--{name}", type=positive, default=size, help=f"default: {size}")
    parser.add_argument("--batch", type=positive, default=1, help="default: 1")
    parser.add_argument("--compilations", type=positive, default=5, help="per model (default: 5)")
    add_common_arguments(parser, seconds=20.0)


def run(options: argparse.Namespace) -> dict:
    """Measures the models; returns the numbers."""
    sizes = Sizes(options.layers, options.heads, options.kv_heads, options.head_dim)
    models = {
        "by hand": Llama(sizes, ByHand),
        'posenc_jax, implementation="jax"': Llama(sizes, with_rope(implementation="jax")),
        "posenc_jax": Llama(sizes, with_rope()),
    }
    weights = nnx.state(models["by hand"])
    for model in models.values():
        nnx.update(model, weights)
    tokens = jax.random.randint(
        jax.random.key(1), (options.batch, 1 + max(options.lengths)), 0, VOCABULARY
    )
    results = []
    for length in options.lengths:
        arguments = {
            name: (*nnx.split(model), tokens[:, : length + 1]) for name, model in models.items()
        }
        compiled, seconds = compile_in_turns(arguments, options.compilations)
        losses = {n: compiled[n](*arguments[n][1:])[0] for n in arguments}
        check_losses(losses)
        cases: dict[str, Callable] = {
            n: functools.partial(compiled[n], *arguments[n][1:]) for n in arguments
        }
        timings = side_by_side(cases, rounds=options.rounds, seconds=options.seconds)
        show(f"training step, {length} tokens, {sizes.layers} layers", timings)
        rows = [dataclasses.asdict(timing) for timing in timings]
        for row in rows:
            row["compile_seconds"] = seconds[row["name"]]
            row["compile_ratio"] = seconds[row["name"]] / seconds["by hand"]
            figures = f"{row['compile_seconds']:.3f} s of tracing and compiling"
            print(f"  {row['name']:34s} {figures}, {row['compile_ratio']:.2f} times as much")
        results.append({"length": length, "rows": rows})
    return {"sizes": dataclasses.asdict(sizes) | {"batch": options.batch}, "results": results}


def check_losses(losses: dict[str, jax.Array]) -> None:
    """Raises `RuntimeError` unless all losses are equal to 1e-4."""
    low, high = min(losses.values()), max(losses.values())
    if not high - low < 1e-4:
        raise RuntimeError(f"the models differ: {losses}")


def train_step(graph: Any, state: Any, tokens: jax.Array) -> tuple[jax.Array, Any]:
    """Returns the loss of a batch [B, T + 1], and the state after a step of SGD."""

    def loss(state):
        logits = nnx.merge(graph, state)(tokens[:, :-1])
        picked = jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[:, 1:, None], -1)
        return -picked.mean()

    value, gradients = jax.value_and_grad(loss)(state)
    return value, jax.tree.map(lambda p, g: p - 0.01 * g, state, gradients)


def compile_in_turns(models: dict[str, tuple], times: int) -> tuple[dict[str, Callable], dict]:
    """Returns the compiled steps, and the least seconds of compilation of each by name.

    Args:
      models: graph, state and tokens of each model, by name.
      times: number of compilations of each.
    """
    compiled, least, names = {}, dict.fromkeys(models, np.inf), list(models)
    for i in range(times):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            jax.clear_caches()
            graph, *arguments = models[name]
            began = time.process_time()
            step = jax.jit(functools.partial(train_step, graph))
            compiled[name] = step.lower(*arguments).compile()
            least[name] = min(least[name], time.process_time() - began)
    return compiled, least


class ByHand(nnx.Module):
    """Grouped attention with RoPE, written as in many models."""

    def __init__(self, sizes: Sizes, rngs: nnx.Rngs):
        self.theta = THETA
        project = functools.partial(nnx.LinearGeneral, sizes.model_dim, use_bias=False, rngs=rngs)
        self.query = project((sizes.heads, sizes.head_dim))
        self.key = project((sizes.kv_heads, sizes.head_dim))
        self.value = project((sizes.kv_heads, sizes.head_dim))
        self.out = nnx.LinearGeneral(
            (sizes.heads, sizes.head_dim), sizes.model_dim, axis=(-2, -1), use_bias=False, rngs=rngs
        )

    def __call__(self, x):
        """Returns [B, T, D]."""
        q, k, v = self.query(x), self.key(x), self.value(x)
        positions = jnp.arange(x.shape[1])
        q, k = rotate(q, positions, self.theta), rotate(k, positions, self.theta)
        return self.out(jax.nn.dot_product_attention(q, k, v, is_causal=True))


def rotate(x: jax.Array, positions: jax.Array, theta: float) -> jax.Array:
    """Returns x [B, T, N, H] rotated by positions [T]."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * theta ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles)[None, :, None], jnp.sin(angles)[None, :, None]
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


def with_rope(**settings: Any) -> Callable[[Sizes, nnx.Rngs], nnx.Module]:
    """Returns a constructor of `posenc_jax.nnx.Attention` with RoPE."""

    def make(sizes, rngs):
        return Attention(
            sizes.model_dim,
            sizes.heads,
            num_kv_heads=sizes.kv_heads,
            head_dim=sizes.head_dim,
            position=pe.RoPE(head_dim=sizes.head_dim, theta=THETA),
            is_causal=True,
            rngs=rngs,
            **settings,
        )

    return make


class Block(nnx.Module):
    """Attention and a gated MLP."""

    def __init__(self, sizes: Sizes, make_attention: Callable, rngs: nnx.Rngs):
        dim, wide = sizes.model_dim, 8 * sizes.model_dim // 3
        linear = functools.partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.attention_norm, self.mlp_norm = (nnx.RMSNorm(dim, rngs=rngs) for _ in range(2))
        self.attention = make_attention(sizes, rngs)
        self.gate, self.up, self.down = linear(dim, wide), linear(dim, wide), linear(wide, dim)

    def __call__(self, x):
        """Returns [B, T, D]."""
        x = x + self.attention(self.attention_norm(x))
        y = self.mlp_norm(x)
        return x + self.down(jax.nn.silu(self.gate(y)) * self.up(y))


class Llama(nnx.Module):
    """A decoder with tied embeddings."""

    def __init__(self, sizes: Sizes, make_attention: Callable):
        rngs = nnx.Rngs(0)
        self.embedding = nnx.Embed(VOCABULARY, sizes.model_dim, rngs=rngs)
        self.norm = nnx.RMSNorm(sizes.model_dim, rngs=rngs)
        self.blocks = nnx.List(Block(sizes, make_attention, rngs) for _ in range(sizes.layers))

    def __call__(self, tokens):
        """Returns logits [B, T, V]."""
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.embedding.attend(self.norm(x))
