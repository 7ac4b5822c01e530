r"""DeBERTa's buckets of distances, exact in integers.

A distance up to `span` / 2 has a bucket of its own. Those after it share by their logarithm, the
last begins at `max_distance` - 1.

Paper: He et al. DeBERTa: Decoding-enhanced BERT with Disentangled Attention. 2020.
https://arxiv.org/abs/2006.03654
Reference code: microsoft/DeBERTa, DeBERTa/deberta/da_utils.py, make_log_bucket_position.
"""

import dataclasses
import functools

import jax.numpy as jnp


@functools.cache
def deberta_boundaries(span: int, max_distance: int) -> tuple[int, ...]:
    """Returns the first distances of the buckets after span // 2, exact in integers.

    >>> deberta_boundaries(256, 512)[:3], deberta_boundaries(256, 512)[-1]
    ((129, 130, 131), 512)
    """
    middle, last = span // 2, max_distance - 1
    steps, n, bounds = middle - 1, middle + 1, []
    for j in range(span - middle):  # ceil(steps ln(n / middle) / ln(last / middle)) > j
        while n**steps * middle**j <= last**j * middle**steps:
            n += 1
        bounds.append(n)
    return tuple(bounds)


@dataclasses.dataclass(frozen=True)
class TableRow:
    """The row of K or Q of a distance; `DeBERTa` says what its settings mean."""

    span: int
    max_distance: int | None

    def __call__(self, shared, table, distance):
        """Returns one row of the table [2 span, H], for one distance."""
        bucket = distance
        if self.max_distance is not None:
            size = jnp.abs(distance)
            bounds = jnp.asarray(deberta_boundaries(self.span, self.max_distance), jnp.int32)
            further = jnp.searchsorted(bounds, size, side="right").astype(jnp.int32)
            middle = jnp.asarray(self.span // 2, size.dtype)
            bucket = jnp.minimum(size, middle).astype(jnp.int32) + further
            bucket *= jnp.sign(distance).astype(jnp.int32)
        row = jnp.clip(bucket + self.span, 0, 2 * self.span - 1).astype(jnp.int32)
        return table[row]
