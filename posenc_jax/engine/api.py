"""The one attention function: it checks, brings everything to one form, and hands over."""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any, Self

import jax

from posenc_jax.checks import require
from posenc_jax.engine.api_arguments import make_problem
from posenc_jax.engine.problem import Problem
from posenc_jax.mask import Window
from posenc_jax.rules import Rule, as_tuple

_IMPLEMENTATIONS = {"reference": "reference", "xla": "xla", "jax": "jax_nn"}
"""The module of each."""


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
    >>> pe.attention(q, k, v, rules=pe.ALiBi(num_heads=2).rules({}), is_causal=True).shape
    (1, 5, 2, 4)
    """
    problem = make_problem(
        q=q,
        k=k,
        v=v,
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
    require(
        implementation is None or implementation in _IMPLEMENTATIONS,
        f"attention: implementation must be None or one of {tuple(_IMPLEMENTATIONS)}, "
        f"got {implementation!r}.",
    )
    chosen = implementation or _choose(problem)
    module = importlib.import_module(f"posenc_jax.engine.{_IMPLEMENTATIONS[chosen]}")
    attend = module.attend
    transform = problem.row_rule
    if transform is not None and not transform.normalized and (return_lse or sinks is not None):
        raise NotImplementedError(
            f"attention: {transform.rule} replaces the softmax, so there is no log-sum-exp to "
            "return and none for sinks to take a share of."
        )
    out, lse = _on_any_mesh(attend, problem)
    return (out, lse) if return_lse else out


def _on_any_mesh(attend: Callable, problem: Problem) -> tuple[jax.Array, jax.Array]:
    """Calls an implementation; on an explicit mesh its inside is left to the compiler.

    Rules are written for scalars and know of no mesh. The output is sharded as q is.
    """
    sharding = jax.typeof(problem.q).sharding
    spec = sharding.spec
    if not any(spec):
        return attend(problem)
    rows = jax.sharding.PartitionSpec(*spec[:3])
    out = jax.sharding.PartitionSpec(*spec[:3], None)
    with jax.sharding.use_abstract_mesh(sharding.mesh):
        return jax.sharding.auto_axes(attend, out_sharding=(out, rows))(problem)


def _choose(p: Problem) -> str:
    """Tiles, but for a decode step and for what is smaller than any tile worth compiling.

    Measured on CPU, forward and backward with a learned bias: tiles are ahead from T = 32 on.
    """
    length, keys = p.q.shape[1], p.k.shape[1]
    return "reference" if length == 1 or length * keys < 32 * 32 else "xla"


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
    implementation: str | None = None

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
