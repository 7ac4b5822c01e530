"""Schemes built from their signatures, and batches of awkward sizes."""

import dataclasses

import jax

# 6 heads are no power of two, 3 key heads divide them, 19 tokens are no multiple of a tile.
SIZES = {"num_heads": 6, "head_dim": 8, "model_dim": 20, "max_length": 64}
KV_HEADS, BATCH, LENGTH = 3, 2, 19


def build(cls, **changes):
    """Builds any scheme: sizes from the shared vocabulary, the rest from its defaults."""
    required = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    return cls(**{name: SIZES[name] for name in required}, **changes)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Batch:
    """Projected tokens and the embedding that they came from."""

    x: jax.Array
    q: jax.Array
    k: jax.Array
    v: jax.Array

    def __getitem__(self, index):
        return Batch(*(a[index] for a in (self.x, self.q, self.k, self.v)))

    def map(self, f):
        return Batch(*map(f, (self.x, self.q, self.k, self.v)))


def make_batch(batch=BATCH, length=LENGTH, seed=0):
    keys = jax.random.split(jax.random.key(seed), 4)
    heads = [SIZES["num_heads"], KV_HEADS, KV_HEADS]
    x = jax.random.normal(keys[0], (batch, length, SIZES["model_dim"]))
    shapes = [(batch, length, n, SIZES["head_dim"]) for n in heads]
    return Batch(x, *(jax.random.normal(k, s) for k, s in zip(keys[1:], shapes, strict=True)))
