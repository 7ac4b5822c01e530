"""The one attention function: it checks, brings everything to one form, and hands over."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import (
    array_of_rank,
    coordinate_values,
    integer_positions,
    require,
)
from posenc_jax.engine.problem import Problem, repeat_heads
from posenc_jax.mask import Window, window_sides
from posenc_jax.positions import count_up
from posenc_jax.scheme import ContentBias, LogitBias, ValueBias, as_tuple

_IMPLEMENTATIONS = {"reference": "reference", "xla": "xla", "jax": "jax_nn"}
"""The module of each."""


def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: LogitBias | tuple[LogitBias, ...] | None = None,
    content: ContentBias | tuple[ContentBias, ...] | None = None,
    value_bias: ValueBias | None = None,
    mask: jax.Array | None = None,
    q_positions: jax.Array | None = None,
    k_positions: jax.Array | None = None,
    q_coordinates: jax.Array | None = None,
    k_coordinates: jax.Array | None = None,
    q_segment_ids: jax.Array | None = None,
    k_segment_ids: jax.Array | None = None,
    contiguous: bool | None = None,
    is_causal: bool = False,
    window: Window = None,
    prefix_length: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact softmax attention with any position rule.

    `logits = softcap(scale * (q . k + scaled terms) + unscaled terms)`, in float32.
    A query that sees no key gets zeros. Keys and values that nobody sees do no harm,
    whatever they hold.

    Args:
      q: queries [B, T, N, H].
      k: keys [B, S, K, H]; K divides N (grouped-query attention).
      v: values [B, S, K, V].
      bias: rules on coordinates, added to the logits.
      content: rules on content and coordinates, added to the logits.
      value_bias: a rule on coordinates, added to the values.
      mask: bool [B or 1, N or 1, T, S], true where the query may see the key; it narrows
        what the other arguments allow.
      q_positions: integers [T] or [B, T], the order of tokens. Default 0 .. T - 1.
      k_positions: integers [S] or [B, S]. Default 0 .. S - 1.
      q_coordinates: what the rules read; integers or float32 [T], [B, T], or [A, B, T]
        for A axes. Default: the positions.
      k_coordinates: [S], [B, S] or [A, B, S].
      q_segment_ids: integers [B, T]; tokens see their own segment, below zero is padding.
      k_segment_ids: integers [B, S]. Default for T = S: those of the queries.
      contiguous: promise that q and k have the same coordinates and that these grow by one
        per slot inside a segment: rules are then evaluated once per distance. Default:
        true exactly where neither positions nor coordinates were given.
      is_causal: hide keys at later positions.
      window: W, a sliding window of W tokens with the query's own among them, or
        `(left, right)`, both inclusive, negative for no limit.
      prefix_length: integers [B]; keys at positions below it are seen by every query.
      scale: the factor on q . k and on scaled terms. Default 1 / sqrt(H).
      softcap: logits become `softcap * tanh(logits / softcap)`.
      sinks: [N], a logit per head that takes its share of the softmax and has no value.
      dropout_rate: share of the weights that are dropped; needs `dropout_key`.
      dropout_key: a JAX random key.
      return_lse: whether to return the log-sum-exp of the logits too.
      implementation: "reference" (materialises T x S), "xla" (tiled), "jax" (hands over to
        `jax.nn.dot_product_attention` what that can do: no rules), or None to choose.

    Returns:
      [B, T, N, V] in q's dtype, and with `return_lse` also float32 [B, T, N].

    Raises:
      ValueError: for shapes, head counts and options that do not fit together.
      TypeError: for positions that are not integers.
      NotImplementedError: if the asked for implementation cannot do what is asked.

    >>> import posenc_jax as pe
    >>> q = k = v = jnp.ones((1, 5, 2, 4))
    >>> pe.attention(q, k, v, bias=pe.ALiBi(num_heads=2).bias({}), is_causal=True).shape
    (1, 5, 2, 4)
    """
    problem = _problem(
        q=q,
        k=k,
        v=v,
        biases=as_tuple(bias),
        contents=as_tuple(content),
        value=value_bias,
        mask=mask,
        q_positions=q_positions,
        k_positions=k_positions,
        q_coordinates=q_coordinates,
        k_coordinates=k_coordinates,
        q_segment_ids=q_segment_ids,
        k_segment_ids=k_segment_ids,
        contiguous=contiguous,
        is_causal=is_causal,
        window=window,
        prefix_length=prefix_length,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
    )
    require(
        implementation is None or implementation in _IMPLEMENTATIONS,
        f"attention: implementation must be None or one of {tuple(_IMPLEMENTATIONS)}, "
        f"got {implementation!r}.",
    )
    chosen = implementation or _choose(problem)
    module = importlib.import_module(f"posenc_jax.engine.{_IMPLEMENTATIONS[chosen]}")
    attend = module.attend
    out, lse = _on_any_mesh(attend, problem)
    return (out, lse) if return_lse else out


def _on_any_mesh(attend: Callable, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Calls an implementation; on an explicit mesh its inside is left to the compiler.

    Rules are written for scalars and know of no mesh. The output is sharded as q is.
    """
    spec = jax.typeof(problem.q).sharding.spec
    if not any(spec):
        return attend(problem)
    rows = jax.sharding.PartitionSpec(*spec[:3])
    out = jax.sharding.PartitionSpec(*spec[:3], None)
    return jax.sharding.auto_axes(attend, out_sharding=(out, rows))(problem)


def _choose(p: Problem) -> str:
    """Tiles, but for a decode step and for what is smaller than any tile worth compiling.

    Measured on CPU, forward and backward with a learned bias: tiles are ahead from T = 32 on.
    """
    length, keys = p.q.shape[1], p.k.shape[1]
    return "reference" if length == 1 or length * keys < 32 * 32 else "xla"


def _problem(*, q, k, v, biases, contents, value, mask, **rest: Any) -> Problem:
    """Checks the arguments of `attention` and brings them to one form."""
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
    return Problem(
        q=q,
        k=k,
        v=v,
        biases=biases,
        contents=tuple(_to_query_heads(c, num_heads) for c in contents),
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
        **_places(batch, length, keys, bool(biases or contents or value), rest),
    )


def _check_rules(q, v, biases, contents, value) -> None:
    """Raises unless every rule is of its type and for the heads and tokens at hand."""
    num_heads = q.shape[2]
    for b in biases:
        if not isinstance(b, LogitBias):
            raise TypeError(f"attention: bias must be a LogitBias, got {type(b).__name__}.")
        require(
            b.num_heads == num_heads,
            f"attention: bias is for {b.num_heads} heads but q has {num_heads}.",
        )
    for c in contents:
        if not isinstance(c, ContentBias):
            raise TypeError(f"attention: content must be a ContentBias, got {type(c).__name__}.")
        rows, cols = jax.tree.leaves(c.rows), jax.tree.leaves(c.cols)
        require(
            bool(rows or cols),
            "attention: content has neither rows nor cols; make them with the scheme's `side`.",
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
                f"attention: rows must be [B, T, N, ...] = {q.shape[:3]}, got {leaf.shape}.",
            )
        for leaf in cols:
            require(
                leaf.shape[:2] == v.shape[:2] and leaf.shape[2:3] in (v.shape[2:3], (num_heads,)),
                f"attention: cols must be [B, S, K or N, ...] for v {v.shape}, got {leaf.shape}.",
            )
    if value is not None:
        wanted = (num_heads, value.table.shape[1], v.shape[3])
        require(
            value.table.shape == wanted,
            f"attention: value_bias.table must be [N, R, V] = {wanted}, got {value.table.shape}.",
        )


def _to_query_heads(content: ContentBias, num_heads: int) -> ContentBias:
    """Gives `cols` of key/value heads to the query heads that they serve."""
    cols = jax.tree.map(lambda x: repeat_heads(x, num_heads), content.cols)
    return dataclasses.replace(content, cols=cols)


def _places(batch: int, length: int, keys: int, ruled: bool, rest: dict) -> dict[str, Any]:
    """Positions, coordinates and segments with their defaults, [B, ...]."""

    def given(side: str, what: str) -> bool:
        return rest[f"{side}_{what}"] is not None

    out: dict[str, Any] = {}
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
        positions = rest[f"{side}_positions"]
        if positions is None:
            positions = rest[f"{other}_positions"] if length == keys else None
        if positions is None:
            positions = count_up(batch, count)
        positions = integer_positions("attention", positions, f"{side}_positions")
        out[f"{side}_positions"] = _per_row(f"{side}_positions", positions, batch, count)
    for side, other, count in (("q", "k", length), ("k", "q", keys)):
        name = f"{side}_coordinates"
        at = rest[name]
        if at is None and length == keys:
            at = rest[f"{other}_coordinates"]
        if at is None:
            out[name] = out[f"{side}_positions"]
            continue
        at = coordinate_values("attention", at, name)
        if at.ndim == 3:
            require(
                at.shape[1:] == (batch, count),
                f"attention: {name} must be [A, B, {count}], got {at.shape}.",
            )
            out[name] = jnp.moveaxis(at, 0, -1)
        else:
            out[name] = _per_row(name, at, batch, count)
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
