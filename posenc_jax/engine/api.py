"""The attention function: it checks arguments, chooses an implementation and runs it."""

import dataclasses
import functools
from typing import Any, Literal, Self, overload

import jax
import jax.numpy as jnp

from posenc_jax.engine.implementation import Implementation
from posenc_jax.engine.implementations import choose, find
from posenc_jax.engine.problem import Problem, make_problem
from posenc_jax.mask import Window
from posenc_jax.rules import Rule, as_tuple


@overload
def attention(  # ty: ignore[inconsistent-overload-implementation]
    q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: Literal[False] = False, **options: Any
) -> jax.Array: ...
@overload
def attention(  # ty: ignore[inconsistent-overload-implementation]
    q: jax.Array, k: jax.Array, v: jax.Array, *, return_lse: bool, **options: Any
) -> tuple[jax.Array, jax.Array]: ...
def attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    rules: Rule | tuple[Rule, ...] = (),
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
    implementation: str | Implementation | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Exact softmax attention with any position rule.

    `logits = softcap(scale * (q . k + scaled terms) + unscaled terms)`, in float32.
    A query that sees no key gets zeros. Keys, values and features that no query sees, and
    queries of padding, may hold anything, NaN included.

    Args:
      q: queries [B, T, N, H].
      k: keys [B, S, K, H]; K divides N (grouped-query attention).
      v: values [B, S, K, V].
      rules: what is added to logits and values: a scheme's `rules(...)`, or rules of your
        own. At most one may transform whole rows of logits, and at most one add to values.
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
      implementation: "reference" (materialises T x S, defines what is correct), "dense" (whole
        rows of logits in blocks of queries), "xla" (tiles), "jax"
        (`jax.nn.dot_product_attention`: no rules), an `Implementation` such as
        `posenc_jax.engine.xla.XLA(...)` with settings of your own, or None to choose. A given
        one is used or raises; it never falls back.

    Returns:
      [B, T, N, V] in q's dtype, and with `return_lse` also float32 [B, T, N].

    Raises:
      ValueError: for shapes, head counts and options that do not fit together.
      TypeError: for positions that are not integers.
      NotImplementedError: if the asked for implementation cannot do what is asked.

    >>> import posenc_jax as pe
    >>> q = k = v = jnp.ones((1, 5, 2, 4))
    >>> pe.attention(q, k, v, rules=pe.ALiBi(num_heads=2).rules({}), is_causal=True).shape
    (1, 5, 2, 4)
    """
    problem = make_problem(
        q,
        k,
        v,
        rules=as_tuple(rules),
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
    if not problem.normalized and (return_lse or sinks is not None):
        raise NotImplementedError(
            "attention: a rule replaces the softmax, so there is no log-sum-exp to return and none "
            "for sinks to take a share of."
        )
    out, lse = run(problem, implementation)
    return (out, lse) if return_lse else out


def run(
    problem: Problem, implementation: str | Implementation | None = None
) -> tuple[jax.Array, jax.Array]:
    """Returns output and log-sum-exp of a problem; see `Implementation.__call__`.

    Raises:
      NotImplementedError: if the implementation does not support the problem.
    """
    given = implementation is not None
    chosen = find(implementation) if given else choose(problem, jax.default_backend())
    reason = chosen.supports(problem)
    if reason is not None:
        raise NotImplementedError(f'attention: implementation="{chosen.name}": {reason}.')
    try:
        return _run(chosen, problem)
    except TypeError as error:
        if "custom_vjp" not in str(error):
            raise
        raise NotImplementedError(
            "attention: tiles have reverse mode, and forward mode over it; for forward mode "
            'alone use implementation="reference".'
        ) from error


@functools.partial(jax.jit, static_argnums=0, inline=True)
def _run(implementation: Implementation, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Runs an implementation; on an explicit mesh its inside is left to the compiler.

    Rules are written for scalars and have no sharding. The output is sharded as q is. Jitted,
    so that calls outside of `jit` compile once.
    """
    sizes = problem.sizes()
    for rule in problem.rules:
        rule.check(sizes)
    problem = problem.without_padding_queries()
    if 0 in (sizes.batch, sizes.length, sizes.keys):
        shape = (*problem.q.shape[:3], sizes.value_dim)
        return jnp.zeros(shape, problem.q.dtype), jnp.full(shape[:3], -jnp.inf)
    sharding = jax.typeof(problem.q).sharding
    spec = sharding.spec
    if not any(spec):
        return implementation(problem)
    rows = jax.sharding.PartitionSpec(*spec[:3])
    out = jax.sharding.PartitionSpec(*spec[:3], None)
    with jax.sharding.use_abstract_mesh(sharding.mesh):
        run = jax.sharding.auto_axes(implementation.__call__, out_sharding=(out, rows))
        return run(problem)


@dataclasses.dataclass(frozen=True)
class AttentionCall:
    """`attention` with everything but q, k, v and rules set; what `Scheme.attend` is given.

    Fields are the arguments of `attention`. A scheme that cannot honour one raises for it.

    Attributes:
      extra_rules: rules added to those of every call.
    """

    extra_rules: tuple[Rule, ...] = ()
    mask: jax.Array | None = None
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
    scale: float | None = None
    softcap: float | None = None
    sinks: jax.Array | None = None
    dropout_rate: float = 0.0
    dropout_key: jax.Array | None = None
    return_lse: bool = False
    implementation: str | Implementation | None = None

    def __call__(
        self, q: jax.Array, k: jax.Array, v: jax.Array, rules: Rule | tuple[Rule, ...] = ()
    ) -> Any:
        """Returns `attention` of q, k and v with these rules and all fields as arguments."""
        options = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        rules = (*as_tuple(rules), *options.pop("extra_rules"))
        return attention(q, k, v, rules=rules, **options)

    def replace(self, **changes: Any) -> Self:
        """Returns the call with some arguments changed."""
        return dataclasses.replace(self, **changes)
