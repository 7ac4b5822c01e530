"""Rules of every kind for the tests of the engine, with the arrays they read, and masks."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import posenc_jax as pe
from posenc_jax.engine.rules import (
    ContentBias,
    DenseBias,
    DotBias,
    LogitBias,
    LogitsTransform,
    SeparableBias,
)
from tests.support import parameters


@dataclasses.dataclass(frozen=True)
class Kind:
    """How to make the parameters of a rule, and the rule from them.

    Attributes:
      make: `make(random, heads, dim) -> params`, by a NumPy generator: nothing is compiled.
      rules: `rules(params, q, k)`, a tuple of rules.
      axes: number of coordinate axes that the rule reads; 0 for plain coordinates.
    """

    make: object
    rules: object
    axes: int = 0


def _normal(random, *shape, mean=0.0):
    return jnp.asarray(random.normal(mean, size=shape), jnp.float32)


def _uniform(random, low, *shape):
    return jnp.asarray(random.uniform(low, 1.0, shape), jnp.float32)


def _spaced(low, heads):
    return jnp.asarray(np.linspace(low, 1.0, heads), jnp.float32)


def _mlp(shared, head, q, k):
    """FIRE: an MLP of a distance, normalised by the query's position."""
    distance = jnp.abs(q - k).astype(jnp.float32)
    c, w1, b1, w2 = (shared[n] for n in ("c", "w1", "b1", "w2"))
    x = jnp.log1p(c * c * distance) / jnp.log1p(c * c * (1.0 + jnp.abs(q).astype(jnp.float32)))
    return jax.nn.relu(x * w1 + b1) @ (w2 * head)


def _fire(random, heads, dim):
    shared = {"c": jnp.float32(0.7)} | {name: _normal(random, 6) for name in ("w1", "b1", "w2")}
    return {"shared": shared, "heads": _normal(random, heads, 6)}


def _two_axes(shared, head, q, k):
    """A distance on a grid, weighted by axis: not relative in the engine's eyes."""
    return -jnp.sum(head * jnp.abs(q - k).astype(jnp.float32))


def _gate(shared, head, row, col, q, k):
    """FoX: the forget gates between key and query, as a difference of running sums."""
    return head * (row - col)


def _gated(params, q, k):
    steps = -jax.nn.softplus(q[..., 0].astype(jnp.float32))
    keys = -jax.nn.softplus(jnp.broadcast_to(k[..., :1], (*k.shape[:3], q.shape[2] // k.shape[2])))
    keys = keys.reshape(q.shape[0], k.shape[1], q.shape[2])
    rows, cols = jnp.cumsum(steps, 1), jnp.cumsum(keys.astype(jnp.float32), 1)
    return (ContentBias(_gate, heads=params, q_features=rows, k_features=cols),)


def _separable(params, q, k):
    """FoX without a rule per pair.

    Running sums lie between 0 and -160. They are centred, since the gradient of `params` would
    otherwise be a difference of two much larger sums, which float32 rounds.
    """
    (rule,) = _gated(params, q, k)
    center = jax.lax.stop_gradient(jnp.mean(rule.k_features))
    features = rule.q_features - center, rule.k_features - center
    rows, cols = (params[None, None] * x for x in features)
    return (SeparableBias(q_features=rows, k_features=-cols),)


def _bounded(shared, head, q, k):
    return head[jnp.clip(q - k, -3, 5) + 3]


def _alibi(params, q, k):
    return (pe.ALiBi(num_heads=q.shape[2]).rules({}),)


def _t5(heads):
    return pe.T5(num_heads=heads, num_buckets=8, max_distance=12)


def _t5_rules(params, q, k):
    return (_t5(q.shape[2]).rules(params),)


def _scaled(params, q, k):
    bounded = LogitBias(
        _bounded,
        heads=params["bounded"],
        relative=True,
        bounds=(-3, 5),
        scaled=True,
        drop_far=True,
    )
    return (bounded, *_t5_rules(params["t5"], q, k))


def _shaw(heads, dim):
    return pe.Shaw(num_heads=heads, head_dim=dim, clip=6)


def _shaw_rules(params, q, k):
    return _shaw(*q.shape[2:]).rules(params, q)


def _whole(shared, heads, row, cols, logits, seen, q, k):
    """All heads and all keys at once: mixed heads, and gates of the keys from each to the last."""
    gates = jnp.where(seen, jax.nn.sigmoid(logits), 0.0)
    upwards = jnp.flip(jnp.cumsum(jnp.flip(gates, 1), 1), 1)
    waves = jnp.cos(0.3 * (q - k).astype(jnp.float32))
    return (
        logits + shared @ jnp.tanh(logits) - heads[:, None] * upwards + row[:, None] * waves[None]
    )


def _whole_rules(params, q, k):
    rows = q[..., 0].astype(jnp.float32)
    rule = LogitsTransform(_whole, heads=params["heads"], shared=params["mix"], q_features=rows)
    return (rule, *_t5_rules(params["t5"], q, k), *_gated(params["gate"], q, k))


@dataclasses.dataclass(frozen=True)
class _Waves:
    """Sines of the distance, the same from each end of the bounds on."""

    low: int = -(10**6)
    high: int = 10**6

    def __call__(self, shared, head, distance):
        clipped = jnp.clip(distance, self.low, self.high).astype(jnp.float32)
        waves = jnp.sin(clipped * shared + 0.3)
        return waves if head is None else head * waves


def _waves_of_pair(shared, head, row, col, q, k):
    """Returns the product of a query with `_Waves`, by angle addition."""
    q_angles, k_angles = (x.astype(jnp.float32) * shared for x in (q, k))
    weight = row.astype(jnp.float32) * head
    both = weight * jnp.sin(q_angles + 0.3), -weight * jnp.cos(q_angles + 0.3)
    return jnp.dot(both[0], jnp.cos(k_angles)) + jnp.dot(both[1], jnp.sin(k_angles))


def _dots(random, heads, dim):
    return {"shared": _uniform(random, 0.1, dim), "heads": _normal(random, heads, dim, mean=1.0)}


def _narrow(params, q, k):
    """Of queries and of keys, with tables smaller than a tile; heads share one of them."""
    of_queries = DotBias(_Waves(-3, 5), **params, q_features=q, bounds=(-3, 5), scaled=True)
    shared = params["shared"][:3]
    of_keys = DotBias(_Waves(-2, 4), shared=shared, k_features=k[..., :3], bounds=(-2, 4))
    return (of_queries, of_keys)


def _wide(params, q, k):
    """Of queries and of keys, with tables larger than a tile of the tests."""
    shared = params["shared"][:3]
    of_queries = DotBias(_Waves(-30, 26), shared=shared, q_features=q[..., :3], bounds=(-30, 26))
    of_keys = DotBias(_Waves(-34, 24), **params, k_features=k, bounds=(-34, 24), scaled=True)
    return (of_queries, of_keys)


def _unbounded(params, q, k):
    pair = DotBias(_Waves(), **params, q_features=q, pair=_waves_of_pair)
    return (pair, DotBias(_Waves(), **params, k_features=k, scaled=True))


def _all_pairs(params, q, k):
    part = params[:, : q.shape[1], : k.shape[1]]
    return (DenseBias(part[None]), *_alibi({}, q, k), DenseBias(part[None, :1], scaled=True))


KINDS = {
    "none": Kind(lambda random, heads, dim: {}, lambda params, q, k: ()),
    "alibi": Kind(lambda random, heads, dim: {}, _alibi),
    "t5": Kind(lambda random, heads, dim: parameters(_t5(heads), 1.0), _t5_rules),
    "scaled": Kind(
        lambda random, heads, dim: {
            "bounded": _normal(random, heads, 9),
            "t5": parameters(_t5(heads), 1.0),
        },
        _scaled,
    ),
    "fire": Kind(
        _fire,
        lambda params, q, k: (LogitBias(_mlp, params["heads"], params["shared"]),),
    ),
    "two_axes": Kind(
        lambda random, heads, dim: _uniform(random, 0.0, heads, 2),
        lambda params, q, k: (LogitBias(_two_axes, params),),
        axes=2,
    ),
    "fox": Kind(lambda random, heads, dim: _spaced(0.5, heads), _gated),
    "separable": Kind(lambda random, heads, dim: _spaced(0.5, heads), _separable),
    "shaw": Kind(lambda random, heads, dim: parameters(_shaw(heads, dim), 1.0), _shaw_rules),
    "whole": Kind(
        lambda random, heads, dim: {
            "heads": _spaced(0.2, heads),
            "mix": _normal(random, heads, heads),
            "gate": _spaced(0.5, heads),
            "t5": parameters(_t5(heads), 1.0),
        },
        _whole_rules,
    ),
    "all_pairs": Kind(lambda random, heads, dim: _normal(random, heads, 64, 64), _all_pairs),
    "narrow": Kind(_dots, _narrow),
    "wide": Kind(_dots, _wide),
    "unbounded": Kind(_dots, _unbounded),
}


def explicit_mask(options, batch, heads, length):
    """Returns options of `attention` with one explicit mask [B, N, T, S], made by NumPy alone.

    It shares no code with the library, and options that differ in the mask share one program.
    """
    options = dict(options)

    def take(name, default=None):
        value = options.pop(name, default)
        return value if value is default or isinstance(value, bool | tuple) else np.asarray(value)

    ids, slots = take("q_segment_ids"), np.arange(length, dtype=np.int32)
    same = None if ids is None else ids[:, :, None] == ids[:, None]
    if ids is not None and "q_positions" not in options:  # They restart in each segment.
        slots = np.tril(same, -1).sum(-1).astype(np.int32)
    places = take("q_positions", slots), take("k_positions", slots)
    q, k = (np.atleast_2d(x) for x in places)
    window, prefix = options.pop("window", None), take("prefix_length")
    sinks, distance = 0, q[:, :, None] - k[:, None]
    away, until = distance, take("k_visible_until")
    if isinstance(window, pe.SlidingWindow):
        if window.by == "coordinates":
            away = options["q_coordinates"][:, None] - options["q_coordinates"]
        window, sinks = window.window, window.num_sink_tokens
    take("contiguous")
    seen = np.full((batch, *distance.shape[1:]), True)
    if take("is_causal", False):
        seen &= distance >= 0
    if window is not None:
        left_side, right_side = window if isinstance(window, tuple) else (window - 1, window - 1)
        seen &= ((away <= left_side) | (k < sinks)[:, None]) & (away >= -right_side)
    if prefix is not None:
        seen |= (k < prefix[:, None])[:, None]
    if until is not None:
        seen &= q[:, :, None] < np.atleast_2d(until)[:, None]
    if ids is not None:
        seen &= same & (ids >= 0)[:, :, None]
    mask = options.pop("mask", True)
    if isinstance(mask, pe.BlockMask):
        index = np.ogrid[:batch, :heads, :length, :length]
        mask = mask.function(*index, *map(np.asarray, mask.arrays))
    mask = np.broadcast_to(seen[:, None] & mask, (batch, heads, *seen.shape[1:]))
    q, k = (np.broadcast_to(x, (batch, x.shape[-1])) for x in (q, k))
    return options | {"mask": mask, "q_positions": q, "k_positions": k}
