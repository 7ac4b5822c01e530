"""The attention function: it checks arguments, chooses an implementation and runs it."""

import dataclasses
import functools
import operator
from collections.abc import Callable
from typing import Any, Literal, Self, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from posenc_jax.checks import (
    array_of_rank,
    finite,
    floating,
    integer_positions,
    require,
    segments,
    token_coordinates,
    token_integers,
)
from posenc_jax.engine import chips
from posenc_jax.engine.block_mask import BlockMask
from posenc_jax.engine.dense import Dense
from posenc_jax.engine.dropout import make_dropout_seeds
from posenc_jax.engine.jax_nn import CuDNN, JaxNN
from posenc_jax.engine.mask import (
    SlidingWindow,
    Window,
    add_saturated,
    by_coordinates,
    window_sides,
)
from posenc_jax.engine.mesh import placement_is_known
from posenc_jax.engine.pallas import Pallas
from posenc_jax.engine.problem import (
    Implementation,
    Implementations,
    LogSumExp,
    Problem,
    platform_of,
    vary_over,
    with_sinks,
    zero_where,
)
from posenc_jax.engine.reference import Reference
from posenc_jax.engine.rule import Rule, as_tuple
from posenc_jax.engine.score_mod import OfScores
from posenc_jax.engine.splash import Splash
from posenc_jax.engine.xla import XLA
from posenc_jax.positions.packing import (
    are_consecutive,
    are_grouped,
    are_restarting,
    count_up,
    grouping,
    restarting,
)

IMPLEMENTATIONS: dict[str, Implementation] = {
    x.name: x for x in (Reference(), Dense(), XLA(), Pallas(), Splash(), JaxNN(), CuDNN())
}
"""Implementations by the word for `attention(implementation=...)`."""

_KERNEL_PAIRS = 2**18
"""T x S from which on `None` takes kernels written in Pallas: a tile or more."""


class CommonOptions(TypedDict, total=False):
    """Options of `attention` and of `scheme_attention`."""

    is_causal: bool
    window: Window
    scale: float | None
    softcap: float | None
    dropout_rate: float
    dropout_key: jax.Array | None
    implementation: Implementations


class AttentionArguments(CommonOptions, total=False):
    """Keyword arguments of `attention`, except `return_lse`."""

    rules: Rule | tuple[Rule, ...]
    mask: jax.Array | BlockMask | None
    q_positions: jax.Array | None
    k_positions: jax.Array | None
    q_coordinates: jax.Array | None
    k_coordinates: jax.Array | None
    q_segment_ids: jax.Array | None
    k_segment_ids: jax.Array | None
    contiguous: bool | None
    prefix_length: jax.Array | None
    k_visible_until: jax.Array | None
    sinks: jax.Array | None


@overload
def attention(  # ty: ignore[inconsistent-overload-implementation]
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: Literal[False] = False,
    **options: Unpack[AttentionArguments],
) -> jax.Array: ...
@overload
def attention(  # ty: ignore[inconsistent-overload-implementation]
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    return_lse: Literal[True],
    **options: Unpack[AttentionArguments],
) -> tuple[jax.Array, jax.Array]: ...
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    rules: Rule | tuple[Rule, ...] = (),
    mask: jax.Array | BlockMask | None = None,
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
    k_visible_until: jax.Array | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    sinks: jax.Array | None = None,
    dropout_rate: float = 0.0,
    dropout_key: jax.Array | None = None,
    return_lse: bool = False,
    implementation: Implementations = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact softmax attention with any position rule.

    `logits = softcap(scale * (q . k + scaled terms) + unscaled terms)`, in float32.
    A query that sees no key gets zeros. Keys, values and features that no query sees with any head,
    and queries of padding, may hold anything, NaN included. If q, k and v have no batch axis,
    arguments and results have none either, except `rules`, where B is 1.

    Args:
      q: queries [B, T, N, H], or [T, N, H].
      k: keys [B, S, K, H]; K divides N (grouped-query attention).
      v: values [B, S, K, V].
      rules: terms added to logits and values, such as a scheme's `rules(...)` or your own.
        At most one may transform whole rows of logits, and at most one add to values.
      mask: bool [B or 1, N or 1, T, S], true where the query may see the key, or a `block_mask`,
        which skips the tiles that it hides. A query sees the keys that no argument hides.
      q_positions: integers [T] or [B, T], the order of tokens. Default: 0, 1, ... in every segment,
        without padding (`positions.from_segment_ids`). Where T = S, positions, coordinates or
        segment ids of one side serve both.
      k_positions: integers [S] or [B, S]. Default: as for queries.
      q_coordinates: coordinates for the rules, integers or float32 [T], [B, T], or
        [A, B, T] for A axes. Default: the positions.
      k_coordinates: [S], [B, S] or [A, B, S].
      q_segment_ids: integers [B, T]; tokens see their own segment, below zero is padding.
      k_segment_ids: integers [B, S]. Default for T = S: `q_segment_ids`.
      contiguous: promise that q and k have the same positions and coordinates and that both grow
        by one per slot inside a segment: slots then order the tokens, and rules are evaluated once
        per distance. Default: true where neither positions nor coordinates were given, and where
        positions have known values of this kind or come from `positions.from_segment_ids` or
        `from_padding_mask`. Tokens of a segment that do not lie side by side are moved first.
      is_causal: hide keys at later positions.
      window: W, the query's own token and W - 1 on either side, which are W tokens if `is_causal`
        and 2 W - 1 if not; or `(left, right)`, both inclusive, negative for no limit; or a
        `SlidingWindow`, which counts coordinates, or keeps first tokens visible.
      prefix_length: integers [B]; keys at positions below it are seen by every query.
      k_visible_until: integers [S] or [B, S]; queries at this position and later do not see the
        key: the end of a branch, in trees of `positions.from_tree`.
      scale: the factor on q . k and on scaled terms. Default 1 / sqrt(H).
      softcap: logits become `softcap * tanh(logits / softcap)`.
      sinks: [N] or [B, T, N], a logit per head, or per query and head, that takes its share of
        the softmax and has no value; queries of padding have none in [B, T, N].
      dropout_rate: share of the weights that are dropped; needs `dropout_key`.
      dropout_key: a JAX random key. Equal keys drop equal weights in every implementation; under
        `jit`, rows whose segments are interleaved drop others than outside of it.
      return_lse: whether to return the log-sum-exp of the logits too.
      implementation: "reference" (materialises T x S, defines correct results), "dense"
        (whole rows of logits in blocks of queries), "xla" (tiles), "pallas" (kernels for TPU and
        for NVIDIA GPUs), "splash" (the kernel for TPUs that comes with JAX: no rules, no dropout
        and no log-sum-exp), "jax" (`jax.nn.dot_product_attention`: no rules but biases by
        distance, and no log-sum-exp), "cudnn" (NVIDIA's kernel, also with segments and masks), an
        `Implementation` such as `posenc_jax.engine.xla.XLA(...)` with settings of your own, or
        None to choose. An implementation that is named is used or raises; it never falls back. Of
        a tuple, such as `("pallas", None)`, the first that serves the call is used.

    Returns:
      [B, T, N, V] in q's dtype, and with `return_lse` also float32 [B, T, N].

    Raises:
      ValueError: for shapes, head counts and options that do not fit together.
      TypeError: for positions that are not integers.
      NotImplementedError: if no implementation that is named supports the call.

    >>> import posenc_jax as pe
    >>> q = k = v = jnp.ones((1, 5, 2, 4))
    >>> pe.attention(q, k, v, rules=pe.ALiBi(num_heads=2).rules({}), is_causal=True).shape
    (1, 5, 2, 4)
    """
    call = AttentionCall(
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
        k_visible_until=k_visible_until,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        dropout_rate=dropout_rate,
        dropout_key=dropout_key,
        return_lse=return_lse,
        implementation=implementation,
    )
    if np.ndim(q) == np.ndim(k) == np.ndim(v) == 3:
        q, k, v = (jnp.expand_dims(x, 0) for x in (q, k, v))
        out = call.with_batch_axis()(q, k, v, rules)
        return jax.tree.map(lambda x: x[0], out)
    return call(q, k, v, rules)


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """The options of a call of `attention`, which `Scheme.attend` gets as one argument.

    Fields are the arguments of `attention` except q, k, v and rules. A scheme that cannot honour
    one raises for it.

    Attributes:
      finite_values: promise that v is finite, also where no query sees it.
    """

    finite_values: bool = False
    mask: jax.Array | BlockMask | None = None
    q_positions: jax.Array | None = None
    k_positions: jax.Array | None = None
    q_coordinates: jax.Array | None = None
    k_coordinates: jax.Array | None = None
    q_segment_ids: jax.Array | None = None
    k_segment_ids: jax.Array | None = None
    contiguous: bool | None = None
    is_causal: bool = False
    window: Window = None
    prefix_length: jax.Array | None = None
    k_visible_until: jax.Array | None = None
    scale: float | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None
    dropout_rate: float = 0.0
    dropout_key: jax.Array | None = None
    return_lse: bool = False
    implementation: Implementations = None

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rule | tuple[Rule, ...] = ()
    ) -> Any:
        """Returns `attention` of q, k and v with these rules and all fields as arguments."""
        problem = make_problem(q, k, v, as_tuple(rules), self)
        if self.return_lse and not problem.normalized:
            raise NotImplementedError(
                "attention: a rule replaces the softmax, so there is no log-sum-exp to return."
            )
        problem = dataclasses.replace(problem, needs_lse=self.return_lse)
        out, lse = run(problem, self.implementation)
        return (out, lse.value) if self.return_lse else out

    def positions(self, q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns positions of queries and keys, int32 [B, T] and [B, S], with their defaults."""

        def of_side(x, positions, segment_ids):
            if positions is None and segment_ids is None:
                return count_up(*x.shape[:2])
            if positions is None:
                return restarting(segments("attention", segment_ids, x.shape[:2]))
            return token_integers("attention", "positions", positions, x.shape[:2])

        return (
            of_side(q, self.q_positions, self.q_segment_ids),
            of_side(k, self.k_positions, self.k_segment_ids),
        )

    def refuse_branches(self, name: str) -> None:
        """Raises `NotImplementedError` for `k_visible_until` and for a `SlidingWindow`.

        For schemes that replace positions and windows.
        """
        names = (
            ("visible_until", self.k_visible_until is not None),
            (
                "a SlidingWindow",
                isinstance(self.window, SlidingWindow),
            ),
        )
        for argument, is_there in names:
            if is_there:
                raise NotImplementedError(f"{name}: {argument}, as queries have other positions.")

    def replace(self, **changes: Any) -> Self:
        """Returns the call with some arguments changed."""
        return dataclasses.replace(self, **changes)

    def with_batch_axis(self) -> Self:
        """Returns the call for q, k and v with a batch of one; positions need no such axis."""
        ranks = {"mask": (3, 0), "prefix_length": (0, 0), "sinks": (2, 0)}
        ranks |= dict.fromkeys(("q_coordinates", "k_coordinates"), (2, 1))
        return self.replace(
            **{
                name: jnp.expand_dims(x, axis)
                for name, (rank, axis) in ranks.items()
                if not isinstance(x := getattr(self, name), BlockMask | None)
                and jnp.ndim(x) == rank
            }
        )


def run(problem: Problem, implementation: Implementations = None) -> tuple[jax.Array, LogSumExp]:
    """Returns output and log-sum-exp of a problem; see `Implementation.__call__`.

    Raises:
      NotImplementedError: if the implementation, or each of a sequence, refuses the problem.
    """
    choices = implementation if isinstance(implementation, tuple | list) else (implementation,)
    require(len(choices) > 0, "attention: implementation is an empty tuple.")
    reasons = []
    for chosen in [find(x) for x in choices]:
        if chosen is None:
            return _run(choose(problem), problem)
        reason = _symbolic_refusal(problem, chosen) or chosen.refusal(problem)
        if reason is None:
            return _run(chosen, problem)
        reasons.append(f'implementation="{chosen.name}": {reason}')
    raise NotImplementedError(f"attention: {'; '.join(reasons)}.")


def _symbolic_refusal(problem: Problem, chosen: Implementation | None = None) -> str | None:
    """Returns why an implementation cannot compute sizes of `jax.export.symbolic_shape`, or None.

    Blocks and tiles are chosen by numbers; "reference" and "jax" have neither.
    """
    sizes = problem.q.shape[0], problem.length, problem.keys
    exports = chosen is not None and chosen.name in ("reference", "jax")
    if exports or all(isinstance(size, int) for size in sizes):
        return None
    return f'B, T and S are {sizes}, and symbolic sizes need "reference", "jax" or None'


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(implementation: Implementation, problem: Problem) -> tuple[jax.Array, LogSumExp]:
    """Runs an implementation. Jitted, so that calls outside of `jit` compile once."""
    sizes = problem.sizes()
    for rule in problem.rules:
        rule.check(sizes)
    shape = (*problem.q.shape[:3], sizes.value_dim)
    if 0 in (*shape[:3], sizes.keys):
        out, lse = jnp.zeros(shape, problem.q.dtype), jnp.full(shape[:3], -jnp.inf, jnp.float32)
        return with_sinks(problem, out, LogSumExp.of(lse))
    if sizes.value_dim == 0:  # The caller wants the log-sum-exp.
        v = jnp.zeros((*problem.v.shape[:3], 1), problem.v.dtype)
        out, lse = _run(implementation, dataclasses.replace(problem, v=v))
        return out[..., :0], lse
    problem = problem.without_padding_queries()
    sharding = jax.typeof(problem.q).sharding

    def attend(problem):
        if not any(sharding.spec):
            return implementation(problem)
        return implementation.on_mesh(problem, sharding.mesh, sharding.spec)

    out, lse = _in_groups(attend, problem) if problem.regroup else attend(problem)
    return out, LogSumExp.of(lse)


def _in_groups(attend: Callable, problem: Problem) -> tuple[jax.Array, Any]:
    """Computes a problem after the tokens of each segment were moved side by side.

    Where they are, which rows usually are, nothing is moved.
    """
    p = vary_over(dataclasses.replace(problem, regroup=False))
    ids: Any = p.q_segment_ids
    grouped = are_grouped(ids)
    if p.block_mask is not None:
        moved_mask = p.block_mask.moved_unless(grouped, p.q.shape[0])
        p = dataclasses.replace(p, block_mask=moved_mask)

    def moved(tree, order_of):
        """Returns arrays [B, T, ...] in another order; sinks of one row are alike for all T."""

        def move(ids, tree):
            order = order_of(ids)

            def of_leaf(x):
                index = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
                return jnp.take_along_axis(x, index, 1) if len(x) == len(order) else x

            return jax.tree.map(of_leaf, tree)

        def select(grouped, ids, tree):
            return jax.lax.cond(grouped, lambda _, x: x, move, ids, tree)

        specs = jax.tree.map(lambda x: jax.typeof(x).sharding.spec, tree)
        if any(map(any, jax.tree.leaves(specs))):  # An explicit mesh.
            select = jax.sharding.auto_axes(select, out_sharding=specs)
        return select(grouped, ids, tree)

    for side in "qk":
        tokens = p.tokens(side)
        slots = {f"{side}_slots": tokens.pop(f"{side}_slots")}
        p = p.with_tokens(side, moved(tokens, grouping) | slots)
    return moved(attend(p), lambda ids: jnp.argsort(grouping(ids), axis=1).astype(jnp.int32))


def find(implementation: Any) -> Implementation | None:
    """Returns the implementation of that name; an `Implementation` and None are returned unchanged.

    Raises:
      ValueError: for anything else.
    """
    if implementation is None or isinstance(implementation, Implementation):
        return implementation
    require(
        isinstance(implementation, str) and implementation in IMPLEMENTATIONS,
        f"attention: implementation must be None, an Implementation, one of "
        f"{tuple(IMPLEMENTATIONS)} or a tuple of these, got {implementation!r}.",
    )
    return IMPLEMENTATIONS[implementation]


def choose(problem: Problem) -> Implementation:
    """Returns the implementation that `None` stands for.

    Decode steps and sizes below the smallest tile use whole rows, all others use tiles: measured
    on CPU, forward and backward with a learned bias, tiles are faster from T = 32 on. On GPUs
    cuDNN comes before tiles where it supports a call without rules, as `jax.nn` users choose it,
    and on TPUs splash attention does from 2**18 pairs on, where traces show the devices. Next come
    the kernels of this package on the chips of `posenc_jax.engine.chips`, from 2**18 pairs and a
    tile of queries on: on an H100 they take a sixth to a thirteenth of the time of tiles, and as
    much as cuDNN. Decode steps never take them: on an H100 whole rows take a third of their time.
    """
    if _symbolic_refusal(problem) is not None:
        return IMPLEMENTATIONS["reference"]
    platform, pairs = problem.platform, problem.length * problem.keys
    small = problem.length == 1 or pairs < 32 * 32
    order = ("dense", "xla") if small else ("xla", "dense")
    large = placement_is_known(problem) and pairs >= _KERNEL_PAIRS
    if platform in ("gpu", "tpu") and large:
        if problem.length >= 128 and chips.are_default(problem):
            order = ("pallas", *order)
        if platform == "tpu":
            order = ("splash", *order)
    if platform == "gpu" and not small and not CuDNN().needs_array(problem):
        order = ("cudnn", *order)
    known = (IMPLEMENTATIONS[name] for name in order)
    chosen = next(x for x in known if x.refusal(problem) is None)
    if platform != "cpu" and large and problem.length >= 128 and chosen.name == "xla":
        chips.warn_of_tiles(problem, Pallas())
    return chosen


def make_problem(q, k, v, rules: tuple[Rule, ...], call: AttentionCall) -> Problem:
    """Checks the arguments of `attention` and returns them in one form."""
    _check_arrays(q, k, v)
    _check_rules(rules)
    _check_numbers(call)
    rules = tuple(map(_in_float32, rules))
    for rule in rules if call.softcap is not None else ():
        function: Any = vars(rule).get("rule")
        while hasattr(function, "rule"):  # Those of `on`.
            function = function.rule
        if isinstance(function, OfScores):
            raise ValueError(
                "attention: softcap needs a score_mod that says adds=True or relative=True, and "
                "adds within it; or let the function do what softcap does."
            )
    batch, length, num_heads, dim = q.shape
    keys = k.shape[1]
    mask, blocks = call.mask, None
    if mask is not None:
        _check_mask(mask, (batch, num_heads, length, keys))
    if isinstance(mask, BlockMask):
        mask, blocks = None, mask
    sinks, prefix, key = call.sinks, call.prefix_length, call.dropout_key
    if sinks is not None and not all(rule.normalized for rule in rules):
        raise NotImplementedError(
            "attention: a rule replaces the softmax, so there is none for sinks to take a share of."
        )
    if prefix is not None:
        array_of_rank("attention", "prefix_length", prefix, 1, "[B]")
        prefix = integer_positions("attention", prefix, "prefix_length")
        require(
            prefix.shape == (batch,),
            f"attention: prefix_length must be [B] = ({batch},), got {prefix.shape}.",
        )
        require(
            call.is_causal or call.window is not None,
            "attention: prefix_length does nothing without is_causal or a window.",
        )
    tokens = _tokens(batch, length, keys, rules, call)
    until = call.k_visible_until
    if until is not None:
        until = token_integers("attention", "k_visible_until", until, (batch, keys))
        until = jnp.broadcast_to(until, (batch, keys))
    window, counts_coordinates = window_sides(call.window), False
    if isinstance(call.window, SlidingWindow):
        counts_coordinates = by_coordinates(call.window) and not tokens["contiguous"]
        require(
            not counts_coordinates or tokens["q_coordinates"].ndim == 2,
            "attention: a window by coordinates needs coordinates of one axis, got "
            f"{tokens['q_coordinates'].shape[2:]} axes.",
        )
    if isinstance(call.window, SlidingWindow) and call.window.num_sink_tokens:
        sink_window = _until_outside(call.window, tokens["k_positions"], prefix)
        until = sink_window if until is None else jnp.minimum(until, sink_window)
        window = -1, call.window.sides[1]
    same_sinks = False
    if sinks is not None:
        floating("attention", "sinks", jnp.asarray(sinks))
        sinks = jnp.asarray(sinks, jnp.float32)
        same_sinks = sinks.ndim == 1
        sinks = _sinks(sinks, (batch, length, num_heads), tokens["q_segment_ids"])
    return Problem(
        q=q,
        k=k,
        v=v,
        rules=rules,
        mask=mask,
        block_mask=blocks,
        prefix_length=prefix,
        k_visible_until=until,
        sinks=sinks,
        same_sinks=same_sinks,
        dropout_seeds=None if key is None else make_dropout_seeds(key, batch, num_heads),
        q_slots=jnp.arange(length, dtype=jnp.int32)[None],
        k_slots=jnp.arange(keys, dtype=jnp.int32)[None],
        is_causal=bool(call.is_causal),
        window=None if window is not None and max(window) < 0 else window,
        window_by_coordinates=counts_coordinates,
        finite_values=call.finite_values,
        scale=dim**-0.5 if call.scale is None else float(call.scale),
        softcap=None if call.softcap is None else float(call.softcap),
        dropout_rate=float(call.dropout_rate),
        platform=platform_of(q),
        **tokens,
    )


def _until_outside(
    window: SlidingWindow, positions: jax.Array, prefix: jax.Array | None
) -> jax.Array:
    """Returns `k_visible_until` of a window with sink tokens, int32 [B, S]."""
    until = add_saturated(add_saturated(positions, window.sides[0]), 1)
    always = (positions >= 0) & (positions < window.num_sink_tokens)
    if prefix is not None:
        always |= positions < prefix[:, None]
    return jnp.where(always, jnp.iinfo(jnp.int32).max, until)


def _in_float32(rule: Any) -> Any:
    """Returns a rule with parameters in float32: a gradient is a sum over all pairs of tokens."""

    def wide(x):
        dtype = jnp.result_type(x)
        half = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
        return jnp.asarray(x, jnp.float32) if half else x

    names = {field.name for field in dataclasses.fields(rule)} & {"heads", "shared"}
    arrays = {name: getattr(rule, name) for name in names}
    new = jax.tree.map(wide, arrays)
    same = all(map(operator.is_, jax.tree.leaves(new), jax.tree.leaves(arrays)))
    return rule if same else dataclasses.replace(rule, **new)


def _sinks(
    sinks: jax.Array, shape: tuple[int, int, int], segment_ids: jax.Array | None
) -> jax.Array:
    """Returns sinks [N] or [B, T, N] as [1 or B, T, N], zero for padding."""
    require(
        sinks.shape in (shape[2:], shape),
        f"attention: sinks must be [N] = {shape[2:]} or [B, T, N] = {shape}, got {sinks.shape}.",
    )
    if sinks.ndim == 1:
        return jnp.broadcast_to(sinks, (1, *shape[1:]))
    return sinks if segment_ids is None else zero_where(segment_ids < 0, sinks)


def _check_arrays(q, k, v) -> None:
    for name, x, axes in (
        ("q", q, "[B, T, N, H]"),
        ("k", k, "[B, S, K, H]"),
        ("v", v, "[B, S, K, V]"),
    ):
        floating("attention", name, x)
        array_of_rank("attention", name, x, 4, axes)
    shapes = f"q {q.shape}, k {k.shape}, v {v.shape}"
    num_heads, kv_heads = q.shape[2], k.shape[2]
    require(k.shape[:3] == v.shape[:3], f"attention: k and v differ in B, S or K: {shapes}.")
    require(k.shape[0] == q.shape[0], f"attention: q and k differ in batch size: {shapes}.")
    require(k.shape[3] == q.shape[3], f"attention: q and k differ in head dim: {shapes}.")
    require(q.shape[3] > 0, f"attention: the head dim of q and k must be at least 1: {shapes}.")
    require(
        kv_heads > 0 and num_heads % kv_heads == 0,
        f"attention: {num_heads} query heads are no multiple of {kv_heads} key heads.",
    )


def _check_static(rule: Rule) -> None:
    """Raises `TypeError` for a function that may change: `jax.jit` would not see it."""
    fields: Any = dataclasses.fields(rule) if dataclasses.is_dataclass(rule) else ()
    for field in fields:
        value = getattr(rule, field.name) if field.metadata.get("static") else None
        try:
            hash(value)
        except TypeError:
            raise TypeError(
                f"attention: {type(rule).__name__}.{field.name} must be hashable, got "
                f"{type(value).__name__}; use a frozen dataclass without arrays and lists."
            ) from None


def _check_rules(rules: tuple) -> None:
    for rule in rules:
        if isinstance(rule, Rule):
            if jax.tree_util.all_leaves([rule]):
                raise TypeError(
                    f"attention: {type(rule).__name__} must be a pytree: put "
                    "@jax.tree_util.register_dataclass and @dataclasses.dataclass(frozen=True) "
                    "above it."
                )
            _check_static(rule)
            continue
        if hasattr(rule, "shape"):
            raise TypeError(
                f"attention: rules must be rules such as LogitBias, got an array of shape "
                f"{rule.shape}; to add a dense bias, give DenseBias(array)."
            )
        got = f"the class {rule.__name__}" if isinstance(rule, type) else type(rule).__name__
        advice = "scheme, give scheme.rules(params), or use scheme_attention."
        if callable(rule) and not isinstance(rule, type):
            got, advice = "a function", "score_mod, give pe.score_mod(function, q, *arrays)."
        raise TypeError(
            f"attention: rules must be rules such as LogitBias, got {got}; of a {advice}"
        )
    for trait, effect in (
        ("whole_rows", "transforms whole rows of logits"),
        ("adds_values", "adds to the values"),
    ):
        matches = [rule for rule in rules if getattr(rule, trait)]
        names = [type(rule).__name__ for rule in matches]
        require(len(matches) < 2, f"attention: more than one rule {effect}: {', '.join(names)}.")


def _check_mask(mask, shape: tuple[int, int, int, int]) -> None:
    if isinstance(mask, BlockMask):
        require(
            all(m in (1, w) for m, w in zip(mask.shape[:2], shape, strict=False))
            and mask.shape[2:] == shape[2:],
            f"attention: mask must be a block_mask of [B or 1, N or 1, T, S] = {shape}, got "
            f"{mask.shape}.",
        )
        return
    if callable(mask):
        raise TypeError(
            "attention: mask must be bool, got a function; of a function of indices, a mask_mod, "
            "give block_mask(function, T, S)."
        )
    dtype = getattr(mask, "dtype", type(mask).__name__)
    if dtype != jnp.bool_:
        raise TypeError(
            f"attention: mask must be bool, got {dtype}; a mask of 0 and 1 needs dtype=bool, "
            "and numbers that are added to logits are `rules`."
        )
    require(
        mask.ndim == 4
        and all(m in (1, w) for m, w in zip(mask.shape[:2], shape, strict=False))
        and mask.shape[2:] == shape[2:],
        f"attention: mask must be [B or 1, N or 1, T, S] = {shape}, got {mask.shape}"
        f"{_mask_hint(mask.shape)}.",
    )


def _mask_hint(shape: tuple[int, ...]) -> str:
    """Returns advice on a mask of another shape."""
    padding = "padding goes into segment_ids, see posenc_jax.positions.from_padding_mask"
    if shape[1:3] == (1, 1) and len(shape) == 4:
        return f"; one row for all queries is no mask; {padding}"
    return {
        2: f"; if it is [T, S], give mask[None, None]; {padding}",
        3: "; give mask[:, None]",
    }.get(len(shape), "")


def _check_numbers(call: AttentionCall) -> None:
    """Checks the arguments that are static."""
    for name in ("is_causal", "contiguous"):
        flag = getattr(call, name)
        if not isinstance(flag, bool | np.bool_) and not (name == "contiguous" and flag is None):
            hint = ""
            if isinstance(flag, Tracer):
                hint = "; under jax.jit name it in static_argnames"
            raise TypeError(f"attention: {name} must be True or False, got {flag!r}{hint}.")
    for name, hint in (
        ("scale", "multiply q by an array"),
        ("softcap", "it is static"),
        ("dropout_rate", "it is static"),
    ):
        x = getattr(call, name)
        if x is None and name != "dropout_rate":
            continue
        if not isinstance(x, int | float | np.number):
            raise TypeError(f"attention: {name} must be a Python number; {hint}.")
        finite("attention", **{name: getattr(call, name)})
    rate, key, softcap = call.dropout_rate, call.dropout_key, call.softcap
    require(0.0 <= rate < 1.0, f"attention: dropout_rate must be in [0, 1), got {rate}.")
    require(
        (rate > 0) == (key is not None),
        f"attention: dropout_rate and dropout_key go together, got dropout_rate={rate} and "
        f"{'no' if key is None else 'a'} dropout_key.",
    )
    if key is not None and not _is_key(key):
        kind, shape = type(key).__name__, jnp.shape(key)
        raise ValueError(
            f"attention: dropout_key must be one random key, got {kind} of shape {shape}."
        )
    require(softcap is None or softcap > 0, f"attention: softcap must be positive, got {softcap}.")


def _is_key(key: Any) -> bool:
    """Returns whether something is one random key, of a typed array or as integers."""
    dtype = getattr(key, "dtype", np.dtype(object))
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        return key.shape == ()
    return dtype == np.uint32 and key.ndim == 1


def _tokens(
    batch: int, length: int, keys: int, rules: tuple[Rule, ...], call: AttentionCall
) -> dict[str, Any]:
    """Returns positions, coordinates and segments of queries and keys, [B, ...]."""
    has_rules = bool(rules)

    def arguments(kind: str) -> dict[str, str]:
        """Returns the name of the argument for each side; one serves both where T = S."""
        names = {side: f"{side}_{kind}" for side in "qk"}
        names = {s: name for s, name in names.items() if getattr(call, name) is not None}
        if len(names) == 1 and length == keys:
            return dict.fromkeys("qk", *names.values())
        return names

    positions, coordinates, segments = map(arguments, ("positions", "coordinates", "segment_ids"))
    for kind, names in (("positions", positions), ("coordinates", coordinates)):
        require(len(names) != 1, f"attention: {kind} were given for {''.join(names)} only.")
    require(
        len(segments) != 1,
        "attention: q_segment_ids and k_segment_ids go together where T and S differ.",
    )

    def raw(names: dict[str, str], side: str) -> Any:
        return getattr(call, names[side]) if side in names else None

    if positions and all(are_restarting(raw(positions, s), raw(segments, s)) for s in "qk"):
        positions = {}
    default = not (positions or coordinates)
    has_order = call.is_causal or call.window is not None or call.k_visible_until is not None
    order_matters = has_rules or has_order
    guessed = order_matters if default else has_order and not positions
    require(
        length == keys or not guessed,
        f"attention: {length} queries and {keys} keys need q_positions and k_positions: "
        "which key is the first query's own cannot be guessed.",
    )
    contiguous, regroup = call.contiguous, False
    if contiguous is None:
        ids = raw(segments, "q")
        same = all(raw(x, "q") is raw(x, "k") for x in (positions, segments))
        contiguous = same and length == keys and not coordinates
        by_distance = any(not rule.whole_rows for rule in rules)
        by_distance |= call.window is not None or call.prefix_length is not None
        if contiguous and positions:
            contiguous = are_consecutive(raw(positions, "q"), ids)
        elif contiguous and segments and by_distance:
            # Slots always have the order of tokens; not their distances where segments lie apart.
            arrays = not isinstance(call.mask, BlockMask | None)
            arrays |= any(rule.pairs is not None for rule in rules)
            regroup = isinstance(ids, Tracer) and not arrays
            contiguous = regroup or are_consecutive(np.arange(length), ids)
    require(
        not contiguous or length == keys or not order_matters,
        f"attention: contiguous=True needs as many queries as keys, got {length} and {keys}.",
    )
    out: dict[str, Any] = {}
    for side, count in (("q", length), ("k", keys)):
        shape, ids = (batch, count), None
        if name := segments.get(side):
            ids = token_integers("attention", name, getattr(call, name), shape)
            ids = jnp.broadcast_to(ids, shape)
        if name := positions.get(side):
            x = token_integers("attention", name, getattr(call, name), shape)
        elif ids is None:
            x = jnp.arange(count, dtype=jnp.int32)[None]
        elif side == "q" or raw(segments, "q") is not raw(segments, "k"):
            x = restarting(ids)
        else:
            x = out["q_positions"]
        out[f"{side}_positions"] = x = jnp.broadcast_to(x, shape)
        if name := coordinates.get(side):
            x = token_coordinates("attention", name, getattr(call, name), shape)
            x = jnp.moveaxis(x, 0, -1) if x.ndim == 3 else jnp.broadcast_to(x, shape)
        out[f"{side}_coordinates"] = x
        out[f"{side}_segment_ids"] = ids
    q_axes, k_axes = out["q_coordinates"].shape[2:], out["k_coordinates"].shape[2:]
    require(
        q_axes == k_axes,
        f"attention: coordinates of queries and keys must have as many axes, got {q_axes} and "
        f"{k_axes} axes.",
    )
    if has_rules and not default:
        _check_reach(out)
    if call.contiguous and length == keys:
        kinds = {"positions": bool(positions), "coordinates": has_rules and bool(coordinates)}
        _check_contiguous(out, [kind for kind, is_read in kinds.items() if is_read])
    places = (*positions.values(), *coordinates.values()) or tuple(segments.values())
    shapes = [jnp.shape(getattr(call, name)) for name in places]
    return out | {
        "same_rows": all(len(s) == 1 or s[-2] == 1 for s in shapes),
        "contiguous": bool(contiguous) and length == keys,
        "regroup": bool(regroup and contiguous),
    }


def _check_contiguous(tokens: dict[str, Any], kinds: list[str]) -> None:
    """Raises for known positions or coordinates for which `contiguous=True` is not true."""
    for kind in kinds:
        q, k, ids = (tokens[name] for name in (f"q_{kind}", f"k_{kind}", "q_segment_ids"))
        if q.ndim > 2 or any(isinstance(x, Tracer) for x in (q, k, ids)):
            continue  # Rules of several axes are evaluated for each pair.
        grow = are_consecutive(q, None) or are_consecutive(q, ids)
        require(
            grow and np.array_equal(q, k),
            f"attention: contiguous=True needs {kind} that grow by one per slot inside a segment, "
            "the same of queries and keys.",
        )


def _check_reach(tokens: dict[str, Any]) -> None:
    """Raises for known coordinates of a segment whose differences overflow int32."""
    sides = [(tokens[f"{side}_coordinates"], tokens[f"{side}_segment_ids"]) for side in "qk"]
    if any(isinstance(x, Tracer) for side in sides for x in side):
        return
    if any(x.dtype != jnp.int32 for x, _ in sides):
        return
    coordinates = np.concatenate([np.asarray(x, np.int64) for x, _ in sides], 1)
    if not coordinates.size or np.ptp(coordinates) < 2**31:
        return
    ids = np.concatenate([np.zeros(x.shape[:2]) if i is None else i for x, i in sides], 1)
    for row, row_ids in zip(coordinates, ids, strict=True):
        for segment in np.unique(row_ids[row_ids >= 0]):
            low, high = (f(row[row_ids == segment], 0) for f in (np.min, np.max))
            require(
                bool(np.all(high - low < 2**31)),
                "attention: rules need distances of coordinates that fit int32, got coordinates "
                f"from {np.min(low)} to {np.max(high)}.",
            )
