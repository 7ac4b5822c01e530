"""Schemes built from their signatures, batches of awkward sizes, and a small model of both."""

import dataclasses
import functools
import importlib
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe

# 6 heads are no power of two, 3 key heads divide them, 19 tokens are no multiple of a tile.
SIZES = {
    "num_heads": 6,
    "num_kv_heads": 3,
    "head_dim": 8,
    "model_dim": 20,
    "max_length": 64,
    "trained_length": 64,
}
KV_HEADS, BATCH, LENGTH = SIZES["num_kv_heads"], 2, 19


def build(cls, **changes):
    """Builds any scheme: sizes from the shared vocabulary, the rest from its defaults."""
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    return cls(**{name: SIZES[name] for name in required if name in SIZES} | changes)


def is_contrib(cls):
    """Whether a scheme is one of `contrib`, which few use: most of its tests are slow."""
    return "contrib" in cls.__module__


TESTS = pathlib.Path(__file__).parent


def declared(name):
    """The tables of a name at the top level of test files, with their files."""
    return [
        (path, getattr(importlib.import_module(".".join(parts)), name))
        for path in sorted(TESTS.rglob("test_*.py"))
        if f"\n{name} = " in path.read_text()
        for parts in [path.relative_to(TESTS.parent).with_suffix("").parts]
    ]


@dataclasses.dataclass(frozen=True)
class Option:
    """Another value of a setting, for `OPTIONS` in the test file of a scheme.

    Attributes:
      value: it must give other numbers than the default.
      settings: other settings, which both sides of the comparison have.
      sinks: compares attention with a sink, where adding a constant to all logits shows.
      initial: compares new parameters, for settings of the initialisation.
    """

    value: object
    settings: dict = dataclasses.field(default_factory=dict)
    sinks: bool = False
    initial: bool = False


initial = functools.partial(Option, initial=True)
ROTARY_OPTIONS = {
    "theta": 100.0,
    "layout": "interleaved",
    "scaling": pe.PI(factor=2.0),
    "rotary_dim": 4,
    "rotary_start": 2,
}


def _seen_by_modules(cls):
    """What a module does for a scheme; of schemes that need the same, one is tested."""
    hooks = ("init", "embed", "mix", "features", "value", "attend", "output")
    overridden = tuple(getattr(cls, hook) is not getattr(pe.Scheme, hook) for hook in hooks)
    traits = build(cls).traits
    return *overridden, traits.reads_x, traits.cache_transformed_keys, traits.shared_over_layers


KINDS = list({_seen_by_modules(cls): name for name, cls in reversed(pe.SCHEMES.items())}.values())


def parameters(scheme, scale=0.5, seed=0):
    """Normal numbers in the shapes of a scheme's parameters; nothing is compiled."""
    random = np.random.default_rng(seed)
    shapes = jax.eval_shape(lambda: scheme.init(jax.random.key(0)))
    return jax.tree.map(lambda a: np.float32(scale * random.normal(size=a.shape)), shapes)


def layer_of(make):
    """The NNX module `make(rngs)`, with numbers of NumPy: nothing is compiled."""
    from flax import nnx

    graph, state = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    random = np.random.default_rng(0)

    def numbers(x):
        return (random.normal(size=x.shape) / max(x.shape[:1] or (1,)) ** 0.5).astype(x.dtype)

    return nnx.merge(graph, jax.tree.map(numbers, state))


def run(function, static, *arguments):
    """Returns `function(*static, *arguments)`, compiled, as NumPy arrays."""
    out = _compiled_function(function, static)(*arguments)
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(out))
    return out if traced else jax.device_get(out)


@functools.lru_cache(maxsize=100)  # A process may map only so many programs.
def _compiled_function(function, static):
    return jax.jit(functools.partial(function, *static))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Projected tokens and the embedding that they came from."""

    x: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    def __getitem__(self, index):
        return Batch(*(a[index] for a in (self.x, self.q, self.k, self.v)))

    def map(self, f):
        return Batch(*map(f, (self.x, self.q, self.k, self.v)))


def make_batch(batch=BATCH, length=LENGTH, seed=0):
    random = np.random.default_rng(seed)
    heads = [SIZES["num_heads"], KV_HEADS, KV_HEADS]
    shapes = [(batch, length, n, SIZES["head_dim"]) for n in heads]
    shapes = [(batch, length, SIZES["model_dim"]), *shapes]
    return Batch(*(random.normal(size=s).astype(np.float32) for s in shapes))


@functools.cache
def projection(dim, heads, head_dim):
    """Fixed numbers [D, N, H] that keep the size of what they project."""
    numbers = np.random.default_rng(heads).normal(size=(dim, heads, head_dim))
    return (numbers / dim**0.5).astype(np.float32)


def forward(scheme, params, tokens, *, cache=None, **options):
    """The embedding and one attention of a scheme, and the cache.

    Projections are linear: what the scheme adds to x is projected and added to q, k and v.
    """
    names = "positions", "coordinates", "segment_ids"
    where = {name: options.get(name) for name in names}
    x = pe.scheme_embedding(scheme, params, tokens.x, cache=cache, **where)

    def projected(y):
        w = projection(x.shape[-1], *y.shape[-2:])
        return y + jnp.einsum("...td,dnh->...tnh", x - tokens.x, w.astype(y.dtype)).astype(y.dtype)

    q, k, v = map(projected, (tokens.q, tokens.k, tokens.v))
    options = {"is_causal": True} | options
    return pe.scheme_attention(scheme, params, q, k, v, x=x, cache=cache, **options)


def compiled(scheme, params, tokens, *, cache=None, **options):
    """`forward`, compiled: tests of one scheme share what they have compiled.

    "reference" is what `None` means at these sizes.
    """
    options = {"implementation": "reference"} | options
    arrays = {n: x for n, x in options.items() if isinstance(x, jax.Array | np.ndarray)}
    static = tuple(sorted((n, x) for n, x in options.items() if n not in arrays))
    return _compiled(scheme, static, params, tokens, cache, arrays)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _compiled(scheme, static, params, tokens, cache, arrays):
    return forward(scheme, params, tokens, cache=cache, **dict(static), **arrays)


def output(scheme, params, tokens, **options):
    return compiled(scheme, params, tokens, **options)[0]


def empty_cache(scheme, batch=BATCH, capacity=LENGTH + 5, **options):
    return pe.new_cache(
        scheme,
        batch,
        capacity,
        num_heads=SIZES["num_heads"],
        num_kv_heads=KV_HEADS,
        head_dim=SIZES["head_dim"],
        model_dim=SIZES["model_dim"],
        **options,
    )


def decode(scheme, params, tokens, chunks, cache, **options):
    """Runs chunks of tokens through a cache; `options` are split along the token axis."""
    outs, start = [], 0
    for size in chunks:
        part = slice(start, start + size)
        here = {
            name: value[:, part] if name in ("positions", "segment_ids", "coordinates") else value
            for name, value in options.items()
        }
        out, cache = compiled(scheme, params, tokens[:, part], cache=cache, **here)
        outs.append(out)
        start += size
    return np.concatenate(outs, 1), cache


def close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


def golden(name: str) -> dict[str, Any]:
    """Returns the content of tests/golden/<name>.json."""
    return json.loads(
        pathlib.Path(__file__).with_name("golden").joinpath(f"{name}.json").read_text()
    )


def recorded(path: pathlib.Path) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the description of a golden .npz file, its entry `about`, and its other arrays."""
    with np.load(path) as file:
        arrays = dict(file)
    return json.loads(str(arrays.pop("about"))), arrays


slow = pytest.mark.slow


def slow_but(values, *quick):
    """The values for `parametrize`, slow but for some; a tuple has those of several arguments."""
    return [
        pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=() if x in quick else slow)
        for x in values
    ]


gpu_lowered = pytest.mark.needs("jax>=0.11.2")
# The interpreter for GPUs of jax 0.11 refuses phases that no thread has waited for.
gpu_interpreted = pytest.mark.needs("jax>=0.12")
