"""The tokens of a segment before each token, and a convolution over them."""

import functools

import jax
import jax.numpy as jnp

from posenc_jax.checks import floating, require, segments

State = tuple[jax.Array, jax.Array]
"""The last tokens [B, count, ...], and 1 + their segment, int32 [B, count]; zeros at the start."""


@functools.partial(jax.jit, static_argnums=3, inline=True)
def preceding_tokens(
    x: jax.Array, segment_ids: jax.Array | None, state: State | None, count: int
) -> tuple[list[tuple[jax.Array, jax.Array]], State]:
    """Returns the `count` tokens of the segment before each token, nearest first, and the state.

    Padding may be anywhere and is skipped; the other tokens of a segment are consecutive.

    Args:
      x: [B, T, ...].
      segment_ids: int32 [B, T], below zero for padding, or None for one segment.
      state: the state returned for the tokens before these, or None.
      count: number of tokens before each.

    Returns:
      For each of the `count` places the tokens there [B, T, ...], zeros where the segment has
      none, with bool [B, T], whether it has one.
    """
    padded = segment_ids is not None
    if segment_ids is None:
        # Zeros sharded as x, whose other axes may be sharded too.
        segment_ids = jnp.zeros_like(jnp.sum(x, range(2, x.ndim)), jnp.int32)
    if state is None:
        none = (jnp.zeros_like(a[:, :0]) for a in (x, segment_ids))
        zeros, ids = (jnp.pad(a, [(0, 0), (count, 0), *[(0, 0)] * (a.ndim - 2)]) for a in none)
        state = zeros, ids
    length = x.shape[1]
    rows = jnp.concatenate([state[0].astype(x.dtype), x], 1)
    ids = jnp.concatenate([state[1] - 1, segment_ids], 1)
    if not padded:
        past = [slice(count - back, count - back + length) for back in range(1, count + 1)]
        tokens = [(rows[:, part], ids[:, part] == segment_ids) for part in past]
        state = rows[:, length:], ids[:, length:] + 1
        return [(_where(same, x), same) for x, same in tokens], state

    def take(array, index):
        """Returns the rows at `index` [B, any]; rows at -1 are undefined."""
        index = index.reshape(*index.shape, *(1,) * (array.ndim - 2))
        return jnp.take_along_axis(array, jnp.maximum(index, 0), 1)

    slots = jax.lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    last = jax.lax.cummax(jnp.where(ids >= 0, slots, -1), axis=1)
    before = jnp.pad(last[:, :-1], ((0, 0), (1, 0)), constant_values=-1)

    def there(index):
        return jnp.where(index < 0, -1, take(ids, index))

    out, index = [], before[:, count:]
    for _ in range(count):
        same = (there(index) == segment_ids) & (segment_ids >= 0)
        out.append((_where(same, take(rows, index)), same))
        index = jnp.where(index < 0, -1, take(before, index))
    newest, index = [], last[:, -1:]
    for _ in range(count):
        newest.append(index)
        index = jnp.where(index < 0, -1, take(before, index))
    index = jnp.concatenate([last[:, :0], *newest[::-1]], 1)
    return out, (_where(index >= 0, take(rows, index)), there(index) + 1)


def _where(condition: jax.Array, x: jax.Array) -> jax.Array:
    """Returns `x` [B, any, ...] where `condition` [B, any], else zeros."""
    return jnp.where(condition.reshape(*condition.shape, *(1,) * (x.ndim - 2)), x, 0)


def short_convolution(
    x: jax.Array,
    kernel: jax.Array,
    segment_ids: jax.Array | None = None,
    state: State | None = None,
) -> tuple[jax.Array, State]:
    """Returns a causal convolution by channel within segments, and its new state.

    Padding may be anywhere and is skipped: a token reads the W - 1 tokens of its segment before
    it, however much padding lies between them.

    Args:
      x: [B, T, F], or with more axes of channels, [B, T, N, H].
      kernel: [W, F], or [W, N, H]; the last row multiplies the token itself, as in
        `torch.nn.Conv1d`. A dynamic convolution has a kernel per token, [B, T, W, F] or
        [B, T, W, N, H]. Channels share an axis of size one.
      segment_ids: int32 [B, T], below zero for padding, or None for one segment. The tokens of a
        segment must be consecutive, but for padding.
      state: the state returned for the tokens before these: the last W - 1 of them and their
        segments. None at the start, which equals zeros.

    Returns:
      The convolution, shaped as x and in its dtype, computed in float32, and the new state.

    Raises:
      ValueError: for shapes that do not match.
      TypeError: for segment ids that are not integers, and x that is not floating.

    >>> x, ids = jnp.array([[[1.0], [9.0], [2.0]]]), jnp.array([[0, -1, 0]])
    >>> short_convolution(x, jnp.array([[10.0], [1.0]]), ids)[0][0, [0, 2], 0]
    Array([ 1., 12.], dtype=float32)
    """
    name = "short_convolution"
    floating(name, "x", x)
    taps = kernel if kernel.ndim > x.ndim else kernel[None, None]
    width, sizes = taps.shape[2:3], taps.shape[:2] + taps.shape[3:]
    require(
        x.ndim >= 3
        and width > (0,)
        and len(sizes) == x.ndim
        and all(size in (1, n) for size, n in zip(sizes, x.shape, strict=True)),
        f"{name}: x and kernel must be [B, T, F] and [W, F] or [B, T, W, F], or with more axes "
        f"than F, got {x.shape} and {kernel.shape}.",
    )
    if segment_ids is not None:
        segment_ids = segments(name, segment_ids, x.shape[:2])
    for part in state or ():
        require(
            part.shape[1] == width[0] - 1,
            f"{name}: state must have the last {width[0] - 1} tokens, as a kernel of {width[0]} "
            f"returns it, got {part.shape[1]}.",
        )
    return _convolved(x, taps, segment_ids, state)


@functools.partial(jax.jit, inline=True)
def _convolved(
    x: jax.Array, taps: jax.Array, segment_ids: jax.Array | None, state: State | None
) -> tuple[jax.Array, State]:
    """Returns `short_convolution` for taps [B or 1, T or 1, W, F or 1], or with more axes."""
    past, state = preceding_tokens(x, segment_ids, state, taps.shape[2] - 1)
    taps = jnp.moveaxis(taps.astype(jnp.float32), 2, 0)
    out = x.astype(jnp.float32) * taps[-1]
    for tap, (token, _) in zip(taps[:-1][::-1], past, strict=True):
        out += token.astype(jnp.float32) * tap
    return out.astype(x.dtype), state
