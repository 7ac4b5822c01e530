"""A causal convolution over the last few tokens, within segments."""

import jax
import jax.numpy as jnp

State = tuple[jax.Array, jax.Array]


def short_convolution(
    x: jax.Array, kernel: jax.Array, segment_ids: jax.Array, state: State | None
) -> tuple[jax.Array, State]:
    """Returns a causal convolution by channel within segments, and its new state.

    Padding may be anywhere and is skipped: a token reads the W - 1 tokens of its segment before
    it, however much padding lies between them.

    Args:
      x: float32 [B, T, F].
      kernel: float32 [W, F]; the last row multiplies the token itself.
      segment_ids: int32 [B, T], below zero for padding.
      state: x and 1 + segment of the last W - 1 tokens before these, or None.

    >>> x, ids = jnp.array([[[1.0], [9.0], [2.0]]]), jnp.array([[0, -1, 0]])
    >>> short_convolution(x, jnp.array([[10.0], [1.0]]), ids, None)[0][0, [0, 2], 0]
    Array([ 1., 12.], dtype=float32)
    """
    before = kernel.shape[0] - 1
    if state is None:
        zeros, ids = (jnp.zeros_like(a[:, :1]) for a in (x, segment_ids))  # Sharded as they are.
        state = jnp.repeat(zeros, before, 1), jnp.repeat(ids, before, 1)
    x = jnp.concatenate([state[0], x], 1)
    segments = jnp.concatenate([state[1] - 1, segment_ids], 1)
    order = jnp.argsort(segments >= 0, axis=1, stable=True)  # Padding first.
    x = jnp.take_along_axis(x, order[:, :, None], 1)
    segments = jnp.take_along_axis(segments, order, 1)
    out = x * kernel[-1][None, None]
    for back in range(1, before + 1):
        same = segments[:, back:] == segments[:, :-back]
        past = jnp.where(same[:, :, None], x[:, :-back], 0.0)
        out = out.at[:, back:].add(past * kernel[before - back][None, None])
    place = jnp.argsort(order, axis=1)[:, before:]
    out = jnp.take_along_axis(out, place[:, :, None], 1)
    last = slice(x.shape[1] - before, None)
    return out, (x[:, last], segments[:, last] + 1)
