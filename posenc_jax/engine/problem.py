"""One attention problem, checked and in one form, as every implementation is given it."""

import dataclasses
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from posenc_jax.checks import array_of_rank, coordinate_values, integer_positions, require
from posenc_jax.mask import Window, visible, window_sides
from posenc_jax.positions.packing import count_up
from posenc_jax.rules import STATIC, Rule, Sizes

_BY_QUERY = ("q", "q_positions", "q_coordinates", "q_segment_ids", "q_slots")
_BY_KEY = ("k", "v", "k_positions", "k_coordinates", "k_segment_ids", "k_slots")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Problem:
    """What to attend to. Arrays are pytree leaves; the rest is static.

    Letters: B batch, T queries, S keys, N query heads, K key/value heads, H head dim,
    V value dim, A coordinate axes.

    Attributes:
      q, k, v: [B, T, N, H], [B, S, K, H], [B, S, K, V].
      rules: rules on logits and values.
      mask: bool, [B or 1, N or 1, T, S], or None.
      q_positions, k_positions: int32 [B, T], [B, S].
      q_coordinates, k_coordinates: int32 or float32 [B, T], [B, S] or [B, T, A], [B, S, A].
      q_segment_ids, k_segment_ids: int32 [B, T], [B, S], or both None.
      prefix_length: int32 [B], or None.
      sinks: float32 [N], or None.
      dropout_seed: uint32 [2] for `keep_mask`, or None.
      q_slots, k_slots: int32 [1, T], [1 or B, S], the slots that dropout hashes.
      contiguous: T = S, q and k have the same positions and coordinates, which grow by
        one per slot inside a segment.
      same_rows: all rows of the batch have the same coordinates.
      is_causal, window, scale, softcap, dropout_rate: as in `attention`.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    rules: tuple[Rule, ...]
    mask: jax.Array | None
    q_positions: jax.Array
    k_positions: jax.Array
    q_coordinates: jax.Array
    k_coordinates: jax.Array
    q_segment_ids: jax.Array | None
    k_segment_ids: jax.Array | None
    prefix_length: jax.Array | None
    sinks: jax.Array | None
    dropout_seed: jax.Array | None
    q_slots: jax.Array
    k_slots: jax.Array
    contiguous: bool = dataclasses.field(metadata=STATIC)
    same_rows: bool = dataclasses.field(metadata=STATIC)
    is_causal: bool = dataclasses.field(metadata=STATIC)
    window: Window = dataclasses.field(metadata=STATIC)
    scale: float = dataclasses.field(metadata=STATIC)
    softcap: float | None = dataclasses.field(metadata=STATIC)
    dropout_rate: float = dataclasses.field(metadata=STATIC)

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
    def normalized(self) -> bool:
        """Whether weights are a softmax."""
        return all(rule.normalized for rule in self.rules)

    def sizes(self) -> Sizes:
        """Returns the sizes that rules are checked against."""
        axes = self.q_coordinates.shape[2] if self.q_coordinates.ndim == 3 else 0
        kv_heads, value_dim = self.v.shape[2:]
        batch = self.q.shape[0]
        return Sizes(batch, self.length, self.keys, self.num_heads, kv_heads, value_dim, axes)

    def queries(self) -> dict[str, Any]:
        """Returns all arrays that belong to queries, with the tokens on axis 1."""
        return {name: getattr(self, name) for name in _BY_QUERY} | {
            "features": tuple(rule.q_features for rule in self.rules),
            "mask": None if self.mask is None else jnp.swapaxes(self.mask, 1, 2),
        }

    def with_queries(self, queries: dict[str, Any]) -> Self:
        """Returns the problem with other queries."""
        x = dict(queries)
        mask, features = x.pop("mask"), zip(self.rules, x.pop("features"), strict=True)
        return dataclasses.replace(
            self,
            rules=tuple(rule.with_features(f, rule.k_features) for rule, f in features),
            mask=None if mask is None else jnp.swapaxes(mask, 1, 2),
            **x,
        )

    def key_arrays(self) -> dict[str, Any]:
        """Returns all arrays that belong to keys, with the tokens on axis 1."""
        return {name: getattr(self, name) for name in _BY_KEY} | {
            "features": tuple(rule.k_features for rule in self.rules),
            "mask": None if self.mask is None else jnp.moveaxis(self.mask, 3, 1),
        }

    def with_keys(self, keys: dict[str, Any]) -> Self:
        """Returns the problem with other keys."""
        x = dict(keys)
        mask, features = x.pop("mask"), zip(self.rules, x.pop("features"), strict=True)
        return dataclasses.replace(
            self,
            rules=tuple(rule.with_features(rule.q_features, f) for rule, f in features),
            mask=None if mask is None else jnp.moveaxis(mask, 1, 3),
            **x,
        )

    def visible(self) -> jax.Array:
        """Returns bool [B, 1 or N, T, S], true where the query sees the key."""
        seen = visible(
            self.q_positions,
            self.k_positions,
            self.q_segment_ids,
            self.k_segment_ids,
            is_causal=self.is_causal,
            window=self.window,
            prefix_length=self.prefix_length,
        )[:, None]
        return seen if self.mask is None else seen & self.mask

    def without_padding_queries(self) -> Self:
        """Returns the problem with zeros for queries and features of padding.

        They may hold anything, and 0 * NaN is NaN in the gradients of keys.
        """
        if self.q_segment_ids is None:
            return self
        queries = self.queries()
        cleaned = {name: queries[name] for name in ("q", "features")}
        return self.with_queries(queries | zero_where(self.q_segment_ids < 0, cleaned))

    def without_unseen_keys(self) -> Self:
        """Returns the problem with zeros for keys, values and features that no query sees.

        They may hold anything, and 0 * NaN is NaN.
        """
        unseen = ~jnp.any(self.visible(), axis=(1, 2))
        keys = self.key_arrays()
        cleaned = {name: keys[name] for name in ("k", "v", "features")}
        return self.with_keys(keys | zero_where(unseen, cleaned))

    def sorted_keys(self) -> Self:
        """Returns the problem with its keys sorted by segment and position."""
        by = (
            (self.k_positions,)
            if self.k_segment_ids is None
            else (
                self.k_positions,
                self.k_segment_ids,
            )
        )
        order = jnp.lexsort(by, axis=-1).astype(jnp.int32)

        def pick(x):
            x = jnp.broadcast_to(x, (order.shape[0], *x.shape[1:]))
            at = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
            return jnp.take_along_axis(x, at, 1)

        return self.with_keys(jax.tree.map(pick, self.key_arrays()))

    def per_query_head(self) -> Self:
        """Returns the problem with key features of every query head, [B, S, N, ...]."""
        keys = self.key_arrays()
        features = jax.tree.map(lambda x: repeat_heads(x, self.num_heads), keys["features"])
        return self.with_keys(keys | {"features": features})


def zero_where(hidden: jax.Array, tree: Any) -> Any:
    """Returns arrays [B, T, ...] with zeros where `hidden`, bool [1 or B, T], is true."""

    def clean(x):
        at = hidden.reshape(*hidden.shape, *(1,) * (x.ndim - 2))
        return jnp.where(at, jnp.zeros((), x.dtype), x)

    return jax.tree.map(clean, tree)


def repeat_heads(x: jax.Array, num_heads: int, axis: int = 2) -> jax.Array:
    """Repeats key/value heads for their query heads: [B, S, K, ...] to [B, S, N, ...]."""
    groups = num_heads // x.shape[axis]
    return x if groups == 1 else jnp.repeat(x, groups, axis)


def keep_mask(
    seed: jax.Array, rate: float, shape: tuple[int, int], q_slots: jax.Array, k_slots: jax.Array
) -> jax.Array:
    """Returns bool [B, N, T, S], false for the weights that dropout removes.

    A hash of seed, batch row, head, query slot and key slot: every implementation drops the
    same weights, whatever its tiles, and stores nothing.

    Args:
      seed: uint32 [2].
      rate: the share that is dropped.
      shape: B and N.
      q_slots: int32 [1, T], the slots of the queries.
      k_slots: int32 [1 or B, S], the slots of the keys.
    """
    b = jnp.arange(shape[0], dtype=jnp.uint32)[:, None, None, None]
    n = jnp.arange(shape[1], dtype=jnp.uint32)[None, :, None, None]
    h = _mix(_mix(seed[0] ^ b) + n)
    h = _mix(h + q_slots.astype(jnp.uint32)[:, None, :, None])
    h = _mix((h ^ seed[1]) + k_slots.astype(jnp.uint32)[:, None, None, :])
    return h >= jnp.uint32(min(int(rate * 2**32), 2**32 - 1))


def _mix(h: jax.Array) -> jax.Array:
    """The finaliser of MurmurHash3: every input bit changes half of the output bits."""
    h = (h ^ (h >> 16)) * jnp.uint32(0x85EBCA6B)
    h = (h ^ (h >> 13)) * jnp.uint32(0xC2B2AE35)
    return h ^ (h >> 16)


def make_problem(q, k, v, *, rules: tuple, mask, **rest: Any) -> Problem:
    """Checks the arguments of `attention` and brings them to one form."""
    _check_arrays(q, k, v)
    _check_rule_types(rules)
    batch, length, num_heads, dim = q.shape
    keys = k.shape[1]
    if mask is not None:
        _check_mask(mask, (batch, num_heads, length, keys))
    seed, sinks, prefix = _check_options(batch, num_heads, rest)
    places = _places(batch, length, keys, bool(rules), rest)
    scale = rest["scale"]
    return Problem(
        q=q,
        k=k,
        v=v,
        rules=rules,
        mask=mask,
        prefix_length=prefix,
        sinks=sinks,
        dropout_seed=seed,
        q_slots=jnp.arange(length, dtype=jnp.int32)[None],
        k_slots=jnp.arange(keys, dtype=jnp.int32)[None],
        is_causal=bool(rest["is_causal"]),
        window=rest["window"],
        scale=dim**-0.5 if scale is None else float(scale),
        softcap=rest["softcap"],
        dropout_rate=rest["dropout_rate"],
        **places,
    )


def _check_arrays(q, k, v) -> None:
    shapes = f"q {jnp.shape(q)}, k {jnp.shape(k)}, v {jnp.shape(v)}"
    for name, x, axes in (
        ("q", q, "[B, T, N, H]"),
        ("k", k, "[B, S, K, H]"),
        ("v", v, "[B, S, K, V]"),
    ):
        array_of_rank("attention", name, x, 4, axes)
        if not jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating):
            raise TypeError(f"attention: {name} must be floating point, got {x.dtype}.")
    num_heads, kv_heads = q.shape[2], k.shape[2]
    require(k.shape[:3] == v.shape[:3], f"attention: k and v differ in B, S or K: {shapes}.")
    require(k.shape[0] == q.shape[0], f"attention: q and k differ in batch size: {shapes}.")
    require(k.shape[3] == q.shape[3], f"attention: q and k differ in head dim: {shapes}.")
    require(
        kv_heads > 0 and num_heads % kv_heads == 0,
        f"attention: {num_heads} query heads are no multiple of {kv_heads} key heads.",
    )


def _check_rule_types(rules: tuple) -> None:
    for rule in rules:
        if isinstance(rule, Rule):
            continue
        if hasattr(rule, "shape"):
            raise TypeError(
                f"attention: rules must be rules such as LogitBias, got an array of shape "
                f"{rule.shape}; to add a dense bias, write a LogitBias whose rule indexes it."
            )
        raise TypeError(
            f"attention: rules must be rules such as LogitBias, got {type(rule).__name__}; of a "
            "scheme, give scheme.rules(params), or use scheme_attention."
        )
    for trait, what in (
        ("whole_rows", "transforms whole rows of logits"),
        ("adds_values", "adds to the values"),
    ):
        found = [rule for rule in rules if getattr(rule, trait)]
        require(len(found) < 2, f"attention: more than one rule {what}: {found}.")


def _check_mask(mask, wanted: tuple[int, int, int, int]) -> None:
    if jnp.asarray(mask).dtype != bool:
        raise TypeError(
            f"attention: mask must be bool, got {mask.dtype}; add numbers to logits by `rules`."
        )
    require(
        mask.ndim == 4
        and all(m in (1, w) for m, w in zip(mask.shape[:2], wanted, strict=False))
        and mask.shape[2:] == wanted[2:],
        f"attention: mask must be [B or 1, N or 1, T, S] = {wanted}, got {mask.shape}; padding "
        "goes into segment_ids, see posenc_jax.positions.from_padding_mask.",
    )


def _check_options(batch: int, num_heads: int, rest: dict) -> tuple[Any, Any, Any]:
    """Returns the dropout seed, sinks and prefix lengths."""
    rate, key = rest["dropout_rate"], rest["dropout_key"]
    softcap, sinks = rest["softcap"], rest["sinks"]
    window_sides(rest["window"])
    for name, hint in (
        ("scale", "multiply q by an array"),
        ("softcap", "it is static"),
        ("dropout_rate", "it is static"),
    ):
        if not isinstance(rest[name], int | float | np.number | None):
            raise TypeError(f"attention: {name} must be a Python number; {hint}.")
    require(0.0 <= rate < 1.0, f"attention: dropout_rate must be in [0, 1), got {rate}.")
    require(
        (rate > 0) == (key is not None),
        f"attention: dropout_rate and dropout_key go together, got dropout_rate={rate} and "
        f"{'no' if key is None else 'a'} dropout_key.",
    )
    require(softcap is None or softcap > 0, f"attention: softcap must be positive, got {softcap}.")
    require(
        sinks is None or jnp.shape(sinks) == (num_heads,),
        f"attention: sinks must be [N] = ({num_heads},), got {getattr(sinks, 'shape', sinks)}.",
    )
    prefix = rest["prefix_length"]
    if prefix is not None:
        array_of_rank("attention", "prefix_length", prefix, 1, "[B]")
        prefix = integer_positions("attention", prefix, "prefix_length")
        require(
            prefix.shape == (batch,),
            f"attention: prefix_length must be [B] = ({batch},), got {prefix.shape}.",
        )
        require(
            rest["is_causal"] or rest["window"] is not None,
            "attention: prefix_length does nothing without is_causal or a window.",
        )
    seed = None if key is None else jax.random.bits(key, (2,), jnp.uint32)
    return seed, sinks, prefix


def _places(batch: int, length: int, keys: int, has_rules: bool, rest: dict) -> dict[str, Any]:
    """Returns positions, coordinates and segments with their defaults, [B, ...]."""

    def given(side: str, what: str) -> bool:
        return rest[f"{side}_{what}"] is not None

    def one_row(x: Any) -> bool:
        return x is None or jnp.ndim(x) == 1 or (jnp.ndim(x) == 2 and jnp.shape(x)[0] == 1)

    out: dict[str, Any] = {"same_rows": True}
    default = not any(given(s, w) for s in "qk" for w in ("positions", "coordinates"))
    order_matters = has_rules or rest["is_causal"] or rest["window"] is not None
    for what in ("positions", "coordinates"):
        require(
            given("q", what) == given("k", what) or length == keys,
            f"attention: {what} were given for {'q' if given('q', what) else 'k'} only.",
        )
    require(
        not (default and order_matters and length != keys),
        f"attention: {length} queries and {keys} keys need q_positions and k_positions: "
        "which key is the first query's own cannot be guessed.",
    )

    def name_of(side: str, other: str, what: str) -> str:
        # Errors name the argument that was given, also where it is the default of the other.
        return f"{side if given(side, what) or length != keys else other}_{what}"

    for side, other, count in (("q", "k", length), ("k", "q", keys)):
        name = name_of(side, other, "positions")
        positions = count_up(batch, count) if rest[name] is None else rest[name]
        positions = integer_positions("attention", positions, name)
        out["same_rows"] &= one_row(rest[name])
        out[f"{side}_positions"] = _per_row(name, positions, batch, count)
    for side, other, count in (("q", "k", length), ("k", "q", keys)):
        name = name_of(side, other, "coordinates")
        given_at = rest[name]
        at = out[f"{side}_positions"]
        if given_at is not None:
            at = coordinate_values("attention", given_at, name)
        out["same_rows"] &= one_row(given_at)
        if at.ndim == 3:
            require(
                at.shape[1:] == (batch, count),
                f"attention: {name} must be [A, B, {count}], got {at.shape}.",
            )
            at = jnp.moveaxis(at, 0, -1)
        else:
            at = _per_row(name, at, batch, count)
        out[f"{side}_coordinates"] = at
    q_at, k_at = out["q_coordinates"], out["k_coordinates"]
    require(
        q_at.shape[2:] == k_at.shape[2:],
        f"attention: coordinates of queries and keys must have as many axes, got "
        f"{q_at.shape[2:]} and {k_at.shape[2:]} axes.",
    )
    out |= _segments(batch, length, keys, rest)
    if has_rules and not default:
        _check_reach(out)
    contiguous = default if rest["contiguous"] is None else rest["contiguous"]
    require(
        not contiguous or length == keys or not order_matters,
        f"attention: contiguous=True needs as many queries as keys, got {length} and {keys}.",
    )
    return out | {"contiguous": bool(contiguous) and length == keys}


def _segments(batch: int, length: int, keys: int, rest: dict) -> dict[str, Any]:
    q_segments, k_segments = rest["q_segment_ids"], rest["k_segment_ids"]
    if q_segments is None and k_segments is None:
        return {"q_segment_ids": None, "k_segment_ids": None}
    if length == keys:
        q_segments = k_segments if q_segments is None else q_segments
        k_segments = q_segments if k_segments is None else k_segments
    require(
        q_segments is not None and k_segments is not None,
        "attention: q_segment_ids and k_segment_ids go together where T and S differ.",
    )
    q_segments = integer_positions("attention", q_segments, "q_segment_ids")
    k_segments = integer_positions("attention", k_segments, "k_segment_ids")
    return {
        "q_segment_ids": _per_row("q_segment_ids", q_segments, batch, length),
        "k_segment_ids": _per_row("k_segment_ids", k_segments, batch, keys),
    }


def _check_reach(places: dict[str, Any]) -> None:
    """Raises for known coordinates of tokens whose differences overflow int32."""
    low, high = 2**31, -(2**31)
    for side in "qk":
        at, segments = places[f"{side}_coordinates"], places[f"{side}_segment_ids"]
        if isinstance(at, Tracer) or isinstance(segments, Tracer) or at.dtype != jnp.int32:
            return
        known = np.asarray(at)
        if segments is not None:
            known = known[np.asarray(segments) >= 0]
        if known.size:
            low, high = min(low, int(known.min())), max(high, int(known.max()))
    require(
        high - low < 2**31,
        f"attention: rules need distances of coordinates that fit int32, got coordinates from "
        f"{low} to {high}.",
    )


def _per_row(name: str, x: jax.Array, batch: int, count: int) -> jax.Array:
    """Returns [T], [1, T] or [B, T] as [B, T]."""
    x = x[None] if x.ndim == 1 else x
    require(
        x.ndim == 2 and x.shape[0] in (1, batch) and x.shape[1] == count,
        f"attention: {name} must be [{count}] or [B, {count}] with B = {batch}, got {x.shape}.",
    )
    return jnp.broadcast_to(x, (batch, count))
