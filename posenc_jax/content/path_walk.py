"""Attention along a path of Householder reflections, as chunked products.

With L the strictly lower part of diag(beta) W W^T, the reflections of a chunk of tokens are

    H_C ... H_1 = I - W^T T diag(beta) W,    T = (I + L)^-1

and for a path that ends within the chunk, the rows of W after its end are zero.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from posenc_jax.rules import LogitsTransform

CHUNK = 64


def attend_along_path(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    w: jax.Array,
    beta: jax.Array,
    scale: float,
    attention: Callable,
) -> jax.Array:
    """Returns attention [B, T, N, V] with a reflection I - beta w w^T at every token.

    Args:
      q, k, v: [B, T, N, H], [B, S, K, H], [B, S, K, V].
      w, beta: [B, S, K or N, H], of length one, and [B, S, K or N].
      scale: of the logits.
      attention: as `Scheme.attend` gets it.
    """
    rule = LogitsTransform(
        _Walk(scale), q_features=q.astype(jnp.float32), k_features=(k, w, beta), expand=_solve
    )
    return attention(q, k, v, rule)


def _solve(shared, heads, cols):
    """Returns K, W, T tril(diag(beta) W K^T, -1) and T diag(beta) W, [chunks, N, C, ...]."""
    k, w, beta = (x.astype(jnp.float32) for x in cols)
    size = min(CHUNK, 1 << (k.shape[0] - 1).bit_length())

    def chunked(x):
        x = jnp.pad(x, ((0, -x.shape[0] % size), *((0, 0),) * (x.ndim - 1)))
        return jnp.swapaxes(x.reshape(-1, size, *x.shape[1:]), 1, 2)

    k, w = chunked(k), chunked(w)
    scaled = chunked(beta)[..., None] * w
    by_w, by_k = (
        jnp.tril(jnp.einsum("znth,znsh->znts", scaled, x, precision="highest"), -1) for x in (w, k)
    )
    inverse = _inverse(by_w)
    solved = (jnp.matmul(inverse, x, precision="highest") for x in (by_k, scaled))
    return k, w, *solved


def _inverse(low):
    """Returns (I + low)^-1 for strictly lower [..., C, C], C a power of two.

    Inverses of the diagonal blocks, twice as wide at every step: products alone, which run
    and shard everywhere, where calls of LAPACK do not.
    """
    lead, size = low.shape[:-2], low.shape[-1]
    inverse = jnp.ones((*lead, size, 1, 1), low.dtype)
    width = 1
    while width < size:
        count = size // (2 * width)
        blocks = low.reshape(*lead, count, 2 * width, count, 2 * width)
        corner = jnp.einsum("...aiaj->...aij", blocks)[..., width:, :width]
        pairs = inverse.reshape(*lead, count, 2, width, width)
        first, second = pairs[..., 0, :, :], pairs[..., 1, :, :]
        corner = jnp.matmul(corner, first, precision="highest")
        corner = -jnp.matmul(second, corner, precision="highest")
        right = ((0, 0),) * (first.ndim - 1)
        first = jnp.pad(first, (*right, (0, width)))
        inverse = jnp.concatenate([first, jnp.concatenate([corner, second], -1)], -2)
        width *= 2
    return inverse[..., 0, :, :]


@dataclasses.dataclass(frozen=True)
class _Walk:
    """Carries a query back over the chunks, and adds what the path changes of its logits."""

    scale: float

    def __call__(self, shared, heads, row, cols, logits, seen, q, k):
        count, _, size, _ = cols[0].shape
        places = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
        takes = seen & (k <= q)[None]
        last = jnp.max(jnp.where(takes, places, -1), axis=1, keepdims=True)
        on_path = jnp.pad(places <= last, ((0, 0), (0, count * size - logits.shape[1])))
        on_path = jnp.swapaxes(on_path.reshape(-1, count, size), 0, 1)

        def step(change, chunk):
            k, w, to_logits, to_query, on_path = chunk
            met = jnp.einsum("nh,nth->nt", row + change, w, precision="highest")
            met = jnp.where(on_path, met, 0.0)
            added = jnp.einsum("nh,nsh->ns", change, k, precision="highest")
            added -= jnp.einsum("nt,nts->ns", met, to_logits, precision="highest")
            change -= jnp.einsum("nt,nth->nh", met, to_query, precision="highest")
            return change, added

        # Made of the row, so that it varies over the mesh as the row does.
        _, added = jax.lax.scan(step, 0.0 * row, (*cols, on_path), reverse=True)
        added = jnp.swapaxes(added, 0, 1).reshape(row.shape[0], -1)[:, : logits.shape[1]]
        return jnp.where(takes, logits + self.scale * added, -jnp.inf)
