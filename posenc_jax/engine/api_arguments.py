"""What `attention` was given, checked and brought to the one form of `Problem`."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import array_of_rank, coordinate_values, integer_positions, require
from posenc_jax.engine.api_axes import check_axes
from posenc_jax.engine.problem import Problem, repeat_heads
from posenc_jax.mask import window_sides
from posenc_jax.positions import count_up
from posenc_jax.rules import ContentBias, DotBias, LogitBias, LogitsTransform, Rule, ValueBias


def make_problem(*, q, k, v, rules, mask, **rest: Any) -> Problem:
    """Checks the arguments of `attention` and brings them to one form."""
    for rule in rules:
        if not isinstance(rule, Rule):
            raise TypeError(f"attention: rules must be rules, got {type(rule).__name__}.")
    biases = tuple(r for r in rules if isinstance(r, LogitBias))
    contents = tuple(r for r in rules if isinstance(r, ContentBias | DotBias))
    transforms = [r for r in rules if isinstance(r, LogitsTransform)]
    values = [r for r in rules if isinstance(r, ValueBias)]
    for found, what in (
        (transforms, "transforms whole rows of logits"),
        (values, "adds to values"),
    ):
        require(len(found) < 2, f"attention: more than one rule {what}: {found}.")
    row_rule = transforms[0] if transforms else None
    value = values[0] if values else None
    shapes = f"q {jnp.shape(q)}, k {jnp.shape(k)}, v {jnp.shape(v)}"
    for name, x, axes in (
        ("q", q, "[B, T, N, H]"),
        ("k", k, "[B, S, K, H]"),
        ("v", v, "[B, S, K, V]"),
    ):
        array_of_rank("attention", name, x, 4, axes)
        if not jnp.issubdtype(jnp.asarray(x).dtype, jnp.floating):
            raise TypeError(f"attention: {name} must be floating point, got {x.dtype}.")
    batch, length, num_heads, dim = q.shape
    keys, kv_heads = k.shape[1:3]
    require(k.shape[:3] == v.shape[:3], f"attention: k and v differ in B, S or K: {shapes}.")
    require(k.shape[0] == batch, f"attention: q and k differ in batch size: {shapes}.")
    require(k.shape[3] == dim, f"attention: q and k differ in head dim: {shapes}.")
    require(
        kv_heads > 0 and num_heads % kv_heads == 0,
        f"attention: {num_heads} query heads are no multiple of {kv_heads} key heads.",
    )
    _check_rules(q, v, biases, contents, value)
    _check_row_rule(q, v, row_rule)
    if mask is not None:
        if jnp.asarray(mask).dtype != bool:
            raise TypeError(
                f"attention: mask must be bool, got {mask.dtype}; add numbers by `bias`."
            )
        wanted = (batch, num_heads, length, keys)
        require(
            mask.ndim == 4
            and all(m in (1, w) for m, w in zip(mask.shape[:2], wanted, strict=False))
            and mask.shape[2:] == wanted[2:],
            f"attention: mask must be [B or 1, N or 1, T, S] = {wanted}, got {mask.shape}.",
        )
    window, rate, key = rest["window"], rest["dropout_rate"], rest["dropout_key"]
    window_sides(window)
    require(0.0 <= rate < 1.0, f"attention: dropout_rate must be in [0, 1), got {rate}.")
    require(
        (rate > 0) == (key is not None),
        f"attention: dropout_rate and dropout_key go together, got dropout_rate={rate} and "
        f"{'no' if key is None else 'a'} dropout_key.",
    )
    softcap, sinks, scale = rest["softcap"], rest["sinks"], rest["scale"]
    require(
        softcap is None or softcap > 0,
        f"attention: softcap must be positive, got {softcap}.",
    )
    if sinks is not None:
        require(
            jnp.shape(sinks) == (num_heads,),
            f"attention: sinks must be [N] = ({num_heads},), got {jnp.shape(sinks)}.",
        )
    if not isinstance(scale, int | float | np.number | None):
        raise TypeError("attention: scale must be a Python number; multiply q by an array.")
    prefix = rest["prefix_length"]
    if prefix is not None:
        array_of_rank("attention", "prefix_length", prefix, 1, "[B]")
        prefix = integer_positions("attention", prefix, "prefix_length")
        require(
            prefix.shape == (batch,),
            f"attention: prefix_length must be [B] = ({batch},), got {prefix.shape}.",
        )
        require(
            rest["is_causal"] or window is not None,
            "attention: prefix_length does nothing without is_causal or a window.",
        )
    places = _places(batch, length, keys, bool(biases or contents or row_rule or value), rest)
    problem = Problem(
        q=q,
        k=k,
        v=v,
        biases=biases,
        contents=tuple(_to_query_heads(c, num_heads) for c in contents),
        row_rule=row_rule,
        value=value,
        mask=mask,
        prefix_length=prefix,
        sinks=sinks,
        dropout_key=key,
        is_causal=bool(rest["is_causal"]),
        window=window,
        scale=dim**-0.5 if scale is None else float(scale),
        softcap=softcap,
        dropout_rate=rate,
        **places,
    )
    check_axes(problem)
    return problem


def _check_rules(q, v, biases, contents, value) -> None:
    """Raises unless every rule is of its type and for the heads and tokens at hand."""
    num_heads = q.shape[2]
    for b in biases:
        require(
            b.num_heads == num_heads,
            f"attention: bias is for {b.num_heads} heads but q has {num_heads}.",
        )
    for c in contents:
        rows, cols = jax.tree.leaves(c.q_features), jax.tree.leaves(c.k_features)
        require(
            bool(rows or cols),
            "attention: content has neither q_features nor k_features; make them with the scheme's "
            "`features`.",
        )
        for leaf in jax.tree.leaves(c.heads):
            require(
                leaf.shape[:1] == (num_heads,),
                f"attention: heads of content must be [N, ...] = ({num_heads}, ...), "
                f"got {leaf.shape}.",
            )
        for leaf in rows:
            require(
                leaf.shape[:3] == q.shape[:3],
                f"attention: q_features must be [B, T, N, ...] = {q.shape[:3]}, got {leaf.shape}.",
            )
        for leaf in cols:
            require(
                leaf.shape[:2] == v.shape[:2] and leaf.shape[2:3] in (v.shape[2:3], (num_heads,)),
                f"attention: k_features must be [B, S, K or N, ...] for v {v.shape}, "
                f"got {leaf.shape}.",
            )
        if isinstance(c, DotBias):
            _check_dot(c)
    if value is not None:
        wanted = (num_heads, value.table.shape[1], v.shape[3])
        require(
            value.table.shape == wanted,
            f"attention: value_bias.table must be [N, R, V] = {wanted}, got {value.table.shape}.",
        )


def _check_row_rule(q, v, row_rule) -> None:
    """Raises unless there is none, or it is for the heads and queries at hand."""
    if row_rule is None:
        return
    for leaf in jax.tree.leaves(row_rule.heads):
        require(
            leaf.shape[:1] == q.shape[2:3],
            f"attention: heads of row_rule must be [N, ...] = ({q.shape[2]}, ...), "
            f"got {leaf.shape}.",
        )
    for leaf in jax.tree.leaves(row_rule.q_features):
        require(
            leaf.shape[:3] == q.shape[:3],
            f"attention: q_features of row_rule must be [B, T, N, ...] = {q.shape[:3]}, "
            f"got {leaf.shape}.",
        )
    for leaf in jax.tree.leaves(row_rule.k_features):
        require(
            leaf.shape[:2] == v.shape[:2] and leaf.shape[2:3] in (v.shape[2:3], q.shape[2:3]),
            f"attention: k_features of row_rule must be [B, S, K or N, ...] for v {v.shape}, "
            f"got {leaf.shape}.",
        )


def _check_dot(c: DotBias) -> None:
    """Raises unless the vectors of tokens and of distances are of one size."""
    require(
        (c.q_features is None) != (c.k_features is None),
        "attention: a DotBias has either q_features or k_features, got "
        f"{'neither' if c.q_features is None else 'both'}.",
    )
    own: Any = c.k_features if c.q_features is None else c.q_features
    one = jax.eval_shape(c.vectors, jax.ShapeDtypeStruct((1,), jnp.int32))
    require(
        own.ndim == 4 and one.shape[2:] == own.shape[3:],
        f"attention: the vectors of a DotBias have shape {one.shape[2:]} per distance and "
        f"{own.shape} of tokens; the last axes must be one and the same.",
    )


def _to_query_heads(content: Any, num_heads: int) -> Any:
    """Gives `cols` of key/value heads to the query heads that they serve."""
    cols = jax.tree.map(lambda x: repeat_heads(x, num_heads), content.k_features)
    return dataclasses.replace(content, k_features=cols)


def _places(batch: int, length: int, keys: int, ruled: bool, rest: dict) -> dict[str, Any]:
    """Positions, coordinates and segments with their defaults, [B, ...]."""

    def given(side: str, what: str) -> bool:
        return rest[f"{side}_{what}"] is not None

    def one_row(x: Any) -> bool:
        return x is None or jnp.ndim(x) == 1 or (jnp.ndim(x) == 2 and jnp.shape(x)[0] == 1)

    out: dict[str, Any] = {"alike": True}
    default = not any(given(s, w) for s in "qk" for w in ("positions", "coordinates"))
    ordered = ruled or rest["is_causal"] or rest["window"] is not None
    for what in ("positions", "coordinates"):
        require(
            given("q", what) == given("k", what) or length == keys,
            f"attention: {what} were given for {'q' if given('q', what) else 'k'} only.",
        )
    require(
        not (default and ordered and length != keys),
        f"attention: {length} queries and {keys} keys need q_positions and k_positions: "
        "which key is the first query's own cannot be guessed.",
    )
    for side, other, count in (("q", "k", length), ("k", "q", keys)):
        # Errors name what was given, also where it stands for both sides.
        own = side if given(side, "positions") or length != keys else other
        name = f"{own}_positions"
        positions = count_up(batch, count) if rest[name] is None else rest[name]
        positions = integer_positions("attention", positions, name)
        out["alike"] &= one_row(rest[name])
        out[f"{side}_positions"] = _per_row(name, positions, batch, count)
    for side, other, count in (("q", "k", length), ("k", "q", keys)):
        own = side if given(side, "coordinates") or length != keys else other
        name = f"{own}_coordinates"
        at = rest[name]
        if at is None:
            at = out[f"{side}_positions"]
        else:
            at = coordinate_values("attention", at, name)
        out["alike"] &= one_row(rest[name])
        if at.ndim == 3:
            require(
                at.shape[1:] == (batch, count),
                f"attention: {name} must be [A, B, {count}], got {at.shape}.",
            )
            at = jnp.moveaxis(at, 0, -1)
        else:
            at = _per_row(name, at, batch, count)
        out[f"{side}_coordinates"] = at
    q_segments, k_segments = rest["q_segment_ids"], rest["k_segment_ids"]
    if q_segments is not None or k_segments is not None:
        if length == keys:
            q_segments = k_segments if q_segments is None else q_segments
            k_segments = q_segments if k_segments is None else k_segments
        require(
            q_segments is not None and k_segments is not None,
            "attention: q_segment_ids and k_segment_ids go together where T and S differ.",
        )
        q_segments = integer_positions("attention", q_segments, "q_segment_ids")
        k_segments = integer_positions("attention", k_segments, "k_segment_ids")
        q_segments = _per_row("q_segment_ids", q_segments, batch, length)
        k_segments = _per_row("k_segment_ids", k_segments, batch, keys)
    contiguous = default if rest["contiguous"] is None else rest["contiguous"]
    require(
        not contiguous or length == keys or not ordered,
        f"attention: contiguous=True needs as many queries as keys, got {length} and {keys}.",
    )
    out |= {"q_segment_ids": q_segments, "k_segment_ids": k_segments}
    return out | {"contiguous": bool(contiguous) and length == keys}


def _per_row(name: str, x: jax.Array, batch: int, count: int) -> jax.Array:
    """[count] or [B, count] to [B, count]."""
    if x.ndim == 1:
        x = x[None]
    require(
        x.ndim == 2 and x.shape[0] in (1, batch) and x.shape[1] == count,
        f"attention: {name} must be [{count}] or [B, {count}] with B = {batch}, got {x.shape}.",
    )
    return jnp.broadcast_to(x, (batch, count))
