r"""DeBERTa: disentangled content-to-position and position-to-content terms.

    logits[i, j] = (q_i . k_j + q_i . K[c] + k_j . Q[c]) / sqrt(3 H)
    c = clip(bucket(i - j) + span, 0, 2 span - 1)

K are the keys of the content-to-position term and Q the queries of the position-to-content term.
Both are projections, different in each layer, of one table of 2 span rows that all layers share; Q
has a bias. 3 is the number of terms: with one of the two the divisor is sqrt(2 H). This is the
`scale` of layers, which `from_hf` gives. The last row of the table is for the furthest past.

The third term uses the row of i - j, as both implementations do; the paper writes j - i. Buckets
are as in DeBERTa-v2, with boundaries computed exactly in integers: distances up to span / 2 have
one bucket each, larger ones share buckets that grow logarithmically up to `max_distance`.
DeBERTa-v2 projects the table, after a layer norm, with the weights of q and k: with `projected` the
results, K and Q, are the parameters. The first DeBERTa has a row for each distance,
`max_distance=None`.

Paper: He et al. DeBERTa: Decoding-enhanced BERT with Disentangled Attention. 2020.
https://arxiv.org/abs/2006.03654
Reference code: microsoft/DeBERTa, DeBERTa/deberta/disentangled_attention.py and da_utils.py.
"""

import bisect
import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import positive_fields, require
from posenc_jax.engine.rules import DotBias
from posenc_jax.ops.init import normals
from posenc_jax.ops.take import take_row
from posenc_jax.schemes.scheme import Scheme, Traits


@functools.cache
def deberta_boundaries(span: int, max_distance: int) -> tuple[int, ...]:
    """Returns the first distance of each bucket after bucket span // 2.

    >>> deberta_boundaries(256, 512)[:3], deberta_boundaries(256, 512)[-1]
    ((129, 130, 131), 512)
    """
    middle, last = span // 2, max_distance - 1
    steps = middle - 1

    def past(n, j):  # ceil(steps ln(n / middle) / ln(last / middle)) > j
        return n**steps * middle**j > last**j * middle**steps

    return tuple(
        bisect.bisect_left(range(max_distance), True, key=functools.partial(past, j=j))
        for j in range(span - middle)
    )


@dataclasses.dataclass(frozen=True)
class _TableRow:
    """The row of K or Q for a distance; fields as in `DeBERTa`."""

    span: int
    max_distance: int | None

    def __call__(self, shared, table, distance):
        """Returns one row of the table [2 span, H], for one distance."""
        bucket = distance
        if self.max_distance is not None:
            size = jnp.abs(distance)
            bounds = jnp.asarray(deberta_boundaries(self.span, self.max_distance), jnp.int32)
            passed = jnp.searchsorted(bounds, size, side="right").astype(jnp.int32)
            middle = jnp.asarray(self.span // 2, size.dtype)
            bucket = jnp.minimum(size, middle).astype(jnp.int32) + passed
            bucket *= jnp.sign(distance).astype(jnp.int32)
        row = jnp.clip(bucket + self.span, 0, 2 * self.span - 1).astype(jnp.int32)
        return take_row(table, row)


@dataclasses.dataclass(frozen=True)
class DeBERTa(Scheme):
    """Disentangled attention (He et al. 2020).

    Checkpoints need a layer with scale=(3 * head_dim) ** -0.5; with one of the two terms, 2.

    Attributes:
      num_heads: the number of query heads, N.
      head_dim: the head dim, H.
      model_dim: D, the size of the rows of the table.
      span: half the number of rows.
      max_distance: distance from which on all share the last bucket; None for one bucket
        per distance up to `span`.
      content_to_position: whether there is the term q_i . K[c].
      position_to_content: whether there is the term k_j . Q[c].
      projected: whether the parameters are K and Q themselves.
      stddev: standard deviation of the initial table and projections.

    Raises:
      ValueError: for sizes below one, more buckets than distances, or neither term.

    >>> scheme = DeBERTa(num_heads=12, head_dim=64, model_dim=768)
    >>> scheme.init(jax.random.key(0))["table"].shape
    (512, 768)
    """

    num_heads: int
    head_dim: int
    model_dim: int
    span: int = 256
    max_distance: int | None = 512
    content_to_position: bool = True
    position_to_content: bool = True
    projected: bool = False
    stddev: float = 0.02
    name: ClassVar[str] = "deberta"
    traits: ClassVar = Traits(relative=True)

    def __post_init__(self):
        positive_fields(self, "num_heads", "head_dim", "model_dim", "span")
        require(
            self.content_to_position or self.position_to_content,
            "deberta: content_to_position and position_to_content must not both be False.",
        )
        if self.max_distance is not None:
            positive_fields(self, "max_distance")
            require(
                self.max_distance > self.span >= 4 and self.span % 2 == 0,
                "deberta: buckets need an even span >= 4 and a max_distance above it, got "
                f"span={self.span} and max_distance={self.max_distance}; or max_distance=None.",
            )

    @property
    def param_axes(self):
        kernel = f"{'rows' if self.projected else 'model_dim'} num_heads head_dim"
        bias, table = "num_heads head_dim", "rows model_dim"
        return {"keys": kernel, "queries": kernel, "bias": bias, "table": table}

    def init(self, key):
        """Returns {"keys", "queries"} [D, N, H], "table" [2 span, D] and "bias" [N, H] of Q.

        With `projected`, {"keys", "queries"} [2 span, N, H] alone. Terms that are switched off
        have no parameters.
        """
        rows = 2 * self.span if self.projected else self.model_dim
        shape = (rows, self.num_heads, self.head_dim)
        shapes = {"keys": shape, "queries": shape, "table": (2 * self.span, self.model_dim)}
        params = normals(jax.random.split(key, 3), self.stddev, shapes)
        if not self.content_to_position:
            del params["keys"]
        if not self.position_to_content:
            del params["queries"]
        if self.projected:
            del params["table"]
        elif self.position_to_content:
            params["bias"] = jnp.zeros(shape[1:], jnp.float32)
        return params

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns q and k as features, each where its term exists."""
        q_features = q if self.content_to_position else None
        return q_features, k if self.position_to_content else None, state

    def rules(self, params, q_features=None, k_features=None):
        row = _TableRow(self.span, self.max_distance)
        last = self.span if self.max_distance is None else self.max_distance
        bounds, terms = (-last, last - 1), []
        if self.content_to_position:
            keys = self._vectors(params, "keys")
            terms.append(
                DotBias(row, heads=keys, q_features=q_features, bounds=bounds, scaled=True)
            )
        if self.position_to_content:
            queries = self._vectors(params, "queries")
            terms.append(
                DotBias(row, heads=queries, k_features=k_features, bounds=bounds, scaled=True)
            )
        return tuple(terms)

    def with_projections(self, params):
        """Returns the scheme and parameters with K and Q in place of the table, for decoding.

        Attention with both is the same, and does not project the table in every step.

        >>> scheme = DeBERTa(num_heads=2, head_dim=4, model_dim=8)
        >>> scheme, params = scheme.with_projections(scheme.init(jax.random.key(0)))
        >>> scheme.projected, params["keys"].shape
        (True, (512, 2, 4))
        """
        names = [name for name in ("keys", "queries") if name in params]
        arrays = {name: jnp.swapaxes(self._vectors(params, name), 0, 1) for name in names}
        return self.replace(projected=True), arrays

    def _vectors(self, params, name):
        """Returns K or Q, float32 [N, 2 span, H]."""
        if self.projected:
            return jnp.swapaxes(params[name], 0, 1)
        table = params["table"].astype(jnp.float32)
        out = jnp.einsum("rd,dnh->nrh", table, params[name], precision="highest")
        return out + params["bias"][:, None] if name == "queries" else out
