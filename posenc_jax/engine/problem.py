"""`Problem`: one checked attention call; `Implementation`: the base class for computing it."""

import abc
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.core import Tracer

from posenc_jax.engine.block_mask import BlockMask
from posenc_jax.engine.mask import LEAST_LOGIT, differentiable_in_units, visible
from posenc_jax.engine.rule import Rule, Sizes
from posenc_jax.engine.tokens import STATIC

_OF_KEYS = "positions", "coordinates", "segment_ids", "slots", "visible_until"
_SIDES = {
    "q": (("q", "q_positions", "q_coordinates", "q_segment_ids", "q_slots", "sinks"), 2),
    "k": (("k", "v", *(f"k_{name}" for name in _OF_KEYS)), 3),
}
"""Arrays that belong to queries and to keys, and the axis of the mask that does."""

_INDEX = {"q": "q_idx", "k": "kv_idx"}
"""The fields of a block mask for queries and for keys."""

_AXES = {
    "q": "BTNH",
    "k": "BSKH",
    "v": "BSKV",
    "mask": "BNTS",
    "q_positions": "BT",
    "k_positions": "BS",
    "q_coordinates": "BTA",
    "k_coordinates": "BSA",
    "q_segment_ids": "BT",
    "k_segment_ids": "BS",
    "prefix_length": "B",
    "k_visible_until": "BS",
    "sinks": "BTN",
    "dropout_seeds": "BN",
    "q_slots": "BT",
    "k_slots": "BS",
}
"""The axes of every array of `Problem`, or its first ones, by which meshes shard it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """The arguments of one attention call. Arrays are pytree leaves, other fields are static.

    Letters: B batch, T queries, S keys, N query heads, K key/value heads, H head dim,
    V value dim, A coordinate axes.

    Attributes:
      q, k, v: [B, T, N, H], [B, S, K, H], [B, S, K, V].
      rules: rules on logits and values.
      mask: bool, [B or 1, N or 1, T, S], or None.
      block_mask: a mask that is a function of two tokens, or None.
      q_positions, k_positions: int32 [B, T], [B, S].
      q_coordinates, k_coordinates: int32 or float32 [B, T], [B, S] or [B, T, A], [B, S, A].
      q_segment_ids, k_segment_ids: int32 [B, T], [B, S], or both None.
      prefix_length: int32 [B], or None.
      k_visible_until: int32 [B, S], or None.
      sinks: float32 [1 or B, T, N], or None.
      dropout_seeds: of `make_dropout_seeds`, uint32 [B, N, 2], or None.
      q_slots, k_slots: int32 [1, T], [1 or B, S], the slots that dropout hashes.
      contiguous: T = S, q and k have the same positions and coordinates, which grow by
        one per slot inside a segment.
      regroup: tokens of a segment may lie in any slots, and have to be moved for `contiguous`.
      same_rows: all rows of the batch have the same coordinates.
      same_sinks: all queries have the same sinks.
      finite_values: v is finite, also where no query sees it.
      window: `window_sides` of the argument.
      window_by_coordinates: the window counts coordinates, which are no positions.
      is_causal, scale, softcap, dropout_rate: as in `attention`.
      platform: "cpu", "gpu" or "tpu", on which it is computed as far as is known.
      needs_lse: whether the log-sum-exp is used.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rules: tuple[Rule, ...]
    mask: jax.Array | None
    block_mask: BlockMask | None
    q_positions: jax.Array
    k_positions: jax.Array
    q_coordinates: jax.Array
    k_coordinates: jax.Array
    q_segment_ids: jax.Array | None
    k_segment_ids: jax.Array | None
    prefix_length: jax.Array | None
    k_visible_until: jax.Array | None
    sinks: jax.Array | None
    dropout_seeds: jax.Array | None
    q_slots: jax.Array
    k_slots: jax.Array
    contiguous: bool = dataclasses.field(metadata=STATIC)
    same_rows: bool = dataclasses.field(metadata=STATIC)
    same_sinks: bool = dataclasses.field(metadata=STATIC)
    finite_values: bool = dataclasses.field(metadata=STATIC)
    is_causal: bool = dataclasses.field(metadata=STATIC)
    window: tuple[int, int] | None = dataclasses.field(metadata=STATIC)
    window_by_coordinates: bool = dataclasses.field(metadata=STATIC)
    scale: float = dataclasses.field(metadata=STATIC)
    softcap: float | None = dataclasses.field(metadata=STATIC)
    dropout_rate: float = dataclasses.field(metadata=STATIC)
    platform: str = dataclasses.field(metadata=STATIC)
    needs_lse: bool = dataclasses.field(default=True, metadata=STATIC)
    regroup: bool = dataclasses.field(default=False, metadata=STATIC)

    @property
    def length(self) -> int:
        """T."""
        return self.q.shape[1]

    @property
    def keys(self) -> int:
        """S."""
        return self.k.shape[1]

    @property
    def num_heads(self) -> int:
        """N."""
        return self.q.shape[2]

    @property
    def whole_rows(self) -> bool:
        """Whether a rule needs all logits of a query at once."""
        return any(rule.whole_rows for rule in self.rules)

    @property
    def ordered_by_slot(self) -> bool:
        """Whether causality and windows are all that orders tokens, and compare slots."""
        return self.contiguous and self.prefix_length is None and self.k_visible_until is None

    @property
    def normalized(self) -> bool:
        """Whether weights are a softmax."""
        return all(rule.normalized for rule in self.rules)

    def sizes(self) -> Sizes:
        """Returns the sizes that rules are checked against."""
        q, k = self.q_coordinates, self.k_coordinates
        return Sizes(
            batch=self.q.shape[0],
            length=self.length,
            keys=self.keys,
            num_heads=self.num_heads,
            kv_heads=self.v.shape[2],
            value_dim=self.v.shape[3],
            axes=q.shape[2] if q.ndim == 3 else 0,
            dtype=jnp.int32 if q.dtype == k.dtype == jnp.int32 else jnp.float32,
        )

    def tokens(self, side: str) -> dict[str, Any]:
        """Returns all arrays of the queries ("q") or the keys ("k"), with the tokens on axis 1."""
        names, mask_axis = _SIDES[side]
        return {name: getattr(self, name) for name in names} | {
            "features": tuple(getattr(rule, f"{side}_features") for rule in self.rules),
            "mask": None if self.mask is None else jnp.moveaxis(self.mask, mask_axis, 1),
            "index": None if self.block_mask is None else getattr(self.block_mask, _INDEX[side]),
            "pairs": tuple(
                None if rule.pairs is None else jnp.moveaxis(rule.pairs, mask_axis, 1)
                for rule in self.rules
            ),
        }

    def with_tokens(self, side: str, tokens: dict[str, Any]) -> Self:
        """Returns the problem with other queries or keys."""
        names, mask_axis = _SIDES[side]
        mask, rules, block_mask = tokens["mask"], [], self.block_mask
        if block_mask is not None:
            block_mask = dataclasses.replace(block_mask, **{_INDEX[side]: tokens["index"]})
        for rule, new, pairs in zip(self.rules, tokens["features"], tokens["pairs"], strict=True):
            features = (new, rule.k_features) if side == "q" else (rule.q_features, new)
            pairs = None if pairs is None else jnp.moveaxis(pairs, 1, mask_axis)
            rules.append(rule.with_features(*features).with_pairs(pairs))
        return dataclasses.replace(
            self,
            rules=tuple(rules),
            mask=None if mask is None else jnp.moveaxis(mask, 1, mask_axis),
            block_mask=block_mask,
            **{name: tokens[name] for name in names},
        )

    def map_arrays(self, function: Callable[[str, jax.Array], Any]) -> Self:
        """Returns the problem with `function(axes, x)` in place of each array.

        `axes` are letters of the first axes of x, as in `_AXES` and `Rule.axes`.
        """
        # Arrays in a rule's fields of other names are of all heads and tokens.
        rules = tuple(
            _map_fields(rule, dict.fromkeys(vars(rule), "") | dict(rule.axes), function)
            for rule in self.rules
        )
        block_mask = self.block_mask
        if block_mask is not None:
            block_mask = _map_fields(block_mask, block_mask.axes, function)
        new = _map_fields(self, _AXES, function, ("rules", "block_mask"))
        return dataclasses.replace(new, rules=rules, block_mask=block_mask)

    def visible(self) -> jax.Array:
        """Returns bool [B, 1 or N, T, S], true where the query sees the key.

        Arrays of all pairs hide keys too, by -inf; rules that are functions are not evaluated.
        """
        coordinates = self.q_coordinates, self.k_coordinates
        seen = visible(
            self.q_positions,
            self.k_positions,
            self.q_segment_ids,
            self.k_segment_ids,
            is_causal=self.is_causal,
            window=self.window,
            window_places=coordinates if self.window_by_coordinates else None,
            prefix_length=self.prefix_length,
            k_visible_until=self.k_visible_until,
        )[:, None]
        if self.block_mask is not None:
            seen &= self.block_mask.pairs()
        for rule in self.rules:
            seen = seen if rule.pairs is None else seen & ~jnp.isneginf(rule.pairs)
        return seen if self.mask is None else seen & self.mask

    def without_padding_queries(self) -> Self:
        """Returns the problem with zeros for queries and features of padding.

        They may hold anything, and 0 * NaN is NaN in the gradients of keys.
        """
        if self.q_segment_ids is None:
            return self
        queries = self.tokens("q")
        cleaned = {name: queries[name] for name in ("q", "features")}
        return self.with_tokens("q", queries | zero_where(self.q_segment_ids < 0, cleaned))

    def without_unseen_keys(self) -> Self:
        """Returns the problem with zeros for keys, values and features that no query sees.

        They may hold anything, and 0 * NaN is NaN.
        """
        return self.without_keys(~jnp.any(self.visible(), axis=(1, 2)))

    def without_keys(self, hidden: jax.Array) -> Self:
        """Returns the problem with zeros for keys, values and features, bool [1 or B, S]."""
        features = tuple(rule.k_features for rule in self.rules)
        k, v, features = zero_where(hidden, (self.k, self.v, features))
        pairs = zip(self.rules, features, strict=True)
        rules = tuple(rule.with_features(rule.q_features, new) for rule, new in pairs)
        return dataclasses.replace(self, k=k, v=v, rules=rules)

    def sorted_keys(self) -> Self:
        """Returns the problem with its keys sorted by segment and position."""
        sort_keys = [x for x in (self.k_positions, self.k_segment_ids) if x is not None]
        order = jnp.lexsort(sort_keys, axis=-1).astype(jnp.int32)

        def pick(x):
            x = jnp.broadcast_to(x, (order.shape[0], *x.shape[1:]))
            indices = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
            return jnp.take_along_axis(x, indices, 1)

        return self.with_tokens("k", jax.tree.map(pick, self.tokens("k")))

    def per_query_head(self) -> Self:
        """Returns the problem with key features of every query head, [B, S, N, ...]."""
        keys = self.tokens("k")
        features = jax.tree.map(lambda x: repeat_heads(x, self.num_heads), keys["features"])
        return self.with_tokens("k", keys | {"features": features})


class LogSumExp(NamedTuple):
    """The log-sum-exp of the logits of each query, top + log(total), both float32.

    Their float32 sum lacks log(total) where logits are near -1e9.

    Attributes:
      top: the greatest logit, finite.
      total: the sum of exp(logit - top); 0 for a query that sees no key.
    """

    top: jax.Array
    total: jax.Array

    @classmethod
    def of(cls, x: "jax.Array | LogSumExp") -> "LogSumExp":
        """Returns a log-sum-exp that may be one array."""
        if isinstance(x, LogSumExp):
            return x
        return cls(jnp.maximum(x, LEAST_LOGIT), jnp.where(jnp.isneginf(x), 0.0, 1.0))

    def divided(self, unit: float) -> "LogSumExp":
        """Returns the log-sum-exp for `top` in a unit."""
        # A selection last: a product that fuses with the sums after it would not be rounded.
        return LogSumExp(jnp.where(self.total == 0, LEAST_LOGIT, self.top / unit), self.total)

    @property
    def value(self) -> jax.Array:
        """The sum, -inf for a query that sees no key."""
        blind = self.total == 0
        return jnp.where(blind, -jnp.inf, self.top + jnp.log(jnp.where(blind, 1.0, self.total)))

    def merge(self, other: Self) -> tuple[jax.Array, jax.Array, "LogSumExp"]:
        """Returns the shares of two parts of the keys in their softmax, and its log-sum-exp."""
        top = jax.lax.stop_gradient(jnp.maximum(self.top, other.top))
        first, second = (x.total * jnp.exp(x.top - top) for x in (self, other))
        total = first + second
        safe = jnp.where(total == 0, 1.0, total)
        return first / safe, second / safe, LogSumExp(top, total)


@dataclasses.dataclass(frozen=True)
class Implementation(abc.ABC):
    """One way to compute attention. Fields are its settings, such as block sizes.

    Every implementation returns the same numbers as "reference" to rounding, or says through
    `refusal` why it cannot.
    """

    name: ClassVar[str]
    """The word for `attention(implementation=...)`."""

    def refusal(self, problem: Problem) -> str | None:
        """Returns why the problem is not supported and the remedy, or None: it is."""
        return None

    def on_mesh(self, problem: Problem, mesh: Any, spec: Any) -> tuple[jax.Array, Any]:
        """Computes a problem on an explicit mesh; q and the results are sharded by `spec`.

        By default the compiler partitions the computation: rules are written for scalars and have
        no sharding.
        """
        rows = jax.sharding.PartitionSpec(*spec[:3])
        out = jax.sharding.PartitionSpec(*spec[:3], None)
        with jax.sharding.use_abstract_mesh(mesh):
            return jax.sharding.auto_axes(self.__call__, out_sharding=(out, rows))(problem)

    @abc.abstractmethod
    def __call__(self, problem: Problem) -> tuple[jax.Array, jax.Array | LogSumExp]:
        """Returns the output, [B, T, N, V] in q's dtype, and the log-sum-exp, float32 [B, T, N].

        One array of the log-sum-exp has no digits for the number of keys where logits are near
        -1e9; a `LogSumExp` has.

        A query that sees no key gets zeros and a log-sum-exp of -inf. Without a softmax
        (`problem.normalized` is false), and where it is not asked for (`problem.needs_lse`),
        the log-sum-exp has no meaning.
        """


Implementations = str | Implementation | None | Sequence[str | Implementation | None]
"""What `attention` takes as `implementation`."""


def platform_of(q: jax.Array) -> str:
    """Returns the platform of q if it is known, else of `jax.default_device` or the backend.

    It is known of JAX's arrays that are committed to devices, but not of tracers.
    """
    if isinstance(q, jax.Array) and not isinstance(q, Tracer) and q.committed:
        return next(iter(q.devices())).platform
    device = jax.config.jax_default_device
    return device.platform if isinstance(device, jax.Device) else device or jax.default_backend()


def feature_refusal(features: Mapping[str, Any]) -> str | None:
    """Returns a refusal that names the features with a true value, or None."""
    names = [name for name, is_there in features.items() if is_there]
    return f'it has no {" and no ".join(names)}; use "xla", or None to choose' if names else None


def _map_fields(
    tree: Any, axes: Mapping[str, str], function: Callable, skipped: tuple[str, ...] = ()
) -> Any:
    """Replaces the arrays of a dataclass; each field must have its axes."""
    fields = (x.name for x in dataclasses.fields(tree) if not x.metadata.get("static"))
    arrays = {name: getattr(tree, name) for name in fields if name not in skipped}
    mapped = {
        name: jax.tree.map(functools.partial(function, axes[name]), x) for name, x in arrays.items()
    }
    return dataclasses.replace(tree, **mapped)


def zero_where(hidden: jax.Array, tree: Any) -> Any:
    """Returns arrays [B, T, ...] with zeros where `hidden`, bool [1 or B, T], is true."""

    def clean(x):
        mask = hidden.reshape(*hidden.shape, *(1,) * (x.ndim - 2))
        return jnp.where(mask, jnp.zeros((), x.dtype), x)

    return jax.tree.map(clean, tree)


def partition(tree: Any) -> tuple[Any, Any]:
    """Returns the tree of differentiable leaves and the tree of the others, with None elsewhere.

    >>> partition({"x": jnp.float32(1), "i": jnp.int32(2)})[1]["x"] is None
    True
    """

    def is_diff(x):
        return jnp.issubdtype(x.dtype, jnp.inexact)

    diff = jax.tree.map(lambda x: x if is_diff(x) else None, tree)
    return diff, jax.tree.map(lambda x: None if is_diff(x) else x, tree)


def combine(diff: Any, nondiff: Any) -> Any:
    """Returns the tree that `partition` split."""
    return jax.tree.map(
        lambda a, b: b if a is None else a, diff, nondiff, is_leaf=lambda x: x is None
    )


def pad_axis(x: jax.Array, axis: int, length: int, *, mode: str = "zero") -> jax.Array:
    """Pads one axis at its end: with zeros, or with copies of the last entry ("edge")."""
    missing = length - x.shape[axis]
    if missing == 0:
        return x
    if mode == "edge":
        last = jax.lax.slice_in_dim(x, x.shape[axis] - 1, x.shape[axis], axis=axis)
        shape = (*x.shape[:axis], missing, *x.shape[axis + 1 :])
        return jnp.concatenate([x, jnp.broadcast_to(last, shape)], axis)
    widths = [(0, missing if a == axis else 0) for a in range(x.ndim)]
    return jnp.pad(x, widths)


def join_blocks(x: jax.Array, axis: int) -> jax.Array:
    """Joins blocks: [n, ..., size, ...] to [..., n * size, ...], with tokens on `axis`."""
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])


def vary_over(tree: Any, axes: frozenset[str] | None = None) -> Any:
    """Makes every array vary over some mesh axes of `shard_map`; gradients are then summed.

    Args:
      tree: pytree of arrays.
      axes: the mesh axes. Default: the axes that any of the arrays varies over; there are none
        outside of `shard_map`.
    """
    if axes is None:
        axes = frozenset().union(*(jax.typeof(x).mat.varying for x in jax.tree.leaves(tree)))

    def vary(x):
        missing = tuple(axes - jax.typeof(x).mat.varying)
        return jax.lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree) if axes else tree


def softmax(logits: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, LogSumExp]:
    """Returns weights [..., S] and log-sum-exp [...] of logits, with sinks [...] if there are any.

    A row of -inf has weights of zero.
    """
    top = jax.lax.stop_gradient(logits.max(-1, initial=LEAST_LOGIT))
    if sinks is not None:
        top = jnp.maximum(top, jax.lax.stop_gradient(sinks))
    weights = jnp.exp(logits - top[..., None])
    total = weights.sum(-1)
    if sinks is not None:
        total += jnp.exp(sinks - top)
    return weights / jnp.where(total == 0, 1.0, total)[..., None], LogSumExp(top, total)


def with_sinks(
    p: Problem, out: jax.Array, lse: LogSumExp, unit: float = 1.0
) -> tuple[jax.Array, LogSumExp]:
    """Returns output and log-sum-exp after the sinks of a problem took their share.

    Args:
      p: the problem.
      out: the output without sinks, [B, T, N, V].
      lse: its log-sum-exp.
      unit: the factor of the logits inside, so that sinks of -1e30 are rounded as logits are.
    """
    if p.sinks is None:
        return out.astype(p.q.dtype), lse
    # A selection last: a product that fuses with the sums after it would not be rounded.
    rounded = differentiable_in_units(p.sinks, unit) / unit
    sinks = jnp.where(jnp.isneginf(p.sinks), -jnp.inf, rounded)
    share, _, lse = lse.merge(LogSumExp(sinks, jnp.ones_like(sinks)))
    return (out.astype(jnp.float32) * share[..., None]).astype(p.q.dtype), lse


def lse_and_delta(
    out: jax.Array, lse: LogSumExp, d_out: jax.Array, d_lse: jax.Array, unit: float = 1.0
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns the arrays of the backward pass: lse and delta, float32 [B, N, T], and d_out.

    With weights p = exp(logits - lse) and their cotangent dp, the cotangent of the logits is
    p * (dp - delta). The rounded lse lacks a rest, all of log(total) where logits are near -1e9:
    its factor exp(-rest) on the weights is on d_out and delta instead, and costs nothing per pair.
    A query that sees no key has the greatest lse, so that its weights are 0.

    Args:
      out, d_out: output and its cotangent, [B, T, N, V].
      lse: log-sum-exp, float32 [B, N, T].
      d_lse: its cotangent.
      unit: logits, top and the result are multiplied by it.
    """
    blind = lse.total == 0
    log_total = unit * jnp.log(jnp.where(blind, 1.0, lse.total))
    rounded = lse.top + log_total
    factor = jnp.exp((rounded - lse.top - log_total) / unit)
    d_out = d_out.astype(jnp.float32)
    delta = jnp.einsum("btnv,btnv->bnt", d_out, out.astype(jnp.float32), precision="highest")
    delta = factor * (delta - d_lse)
    d_out = d_out * jnp.swapaxes(factor, 1, 2)[..., None]
    return jnp.where(blind, -LEAST_LOGIT, rounded), delta, d_out


def repeat_heads(x: jax.Array, num_heads: int, axis: int = 2) -> jax.Array:
    """Repeats key/value heads for their query heads: [B, S, K, ...] to [B, S, N, ...]."""
    groups = num_heads // x.shape[axis]
    return x if groups == 1 else jnp.repeat(x, groups, axis)
