r"""RoPE: queries and keys rotate by an angle in proportion to their position.

    (x_a, x_b) -> (x_a cos(m w_p) - x_b sin(m w_p),  x_b cos(m w_p) + x_a sin(m w_p))
    w_p = theta^(-2p / d),      p = 0 .. d/2 - 1

for the pair p of dimensions (a, b) at position m. Between q at m and k at n the angle is
(m - n) w_p, so that q . k depends on the distance alone.

Which dimensions make a pair, and the sign of the angle, differ between models: see `layout` in
`posenc_jax.schemes.rotary.layouts`, which also converts weights from one layout to another.

`rotary_dim` rotates the first d < H dimensions alone (GPT-J, NeoX, Phi), with the frequencies of a
head of d; `rotary_start` = H - d rotates the last d (DeepSeek-V4). Rotated
keys can be cached. Cosine and sine are exact at any int32 position, products are in float32.

Paper: Su et al. RoFormer: Enhanced Transformer with Rotary Position Embedding. 2021.
https://arxiv.org/abs/2104.09864
Reference code: ZhuiyiTechnology/roformer; kingoflolz/mesh-transformer-jax,
mesh_transformer/layers.py; EleutherAI/gpt-neox, megatron/model/positional_embeddings.py.
"""

import dataclasses
from typing import ClassVar

import jax

from posenc_jax.checks import array_of_rank, coordinate_values, require
from posenc_jax.schemes.rotary.base import ScalableRotary
from posenc_jax.schemes.rotary.frequencies import FrequencyMap


def apply_rope(
    x: jax.Array,
    positions: jax.Array,
    *,
    theta: float = 10000.0,
    layout: str = "half",
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    scaling: FrequencyMap | tuple[FrequencyMap, ...] = (),
) -> jax.Array:
    """Returns x rotated by its positions, in the dtype of x.

    Args:
      x: queries or keys [B, T, N, H] or [T, N, H]. Tokens come before heads; x [B, N, T, H] is not
        noticed where N = T.
      positions: integers or float32, [T] or [B, T].
      theta: the base of the frequencies.
      layout: the dimensions of a pair; see `posenc_jax.schemes.rotary.layouts`.
      rotary_dim: d, the number of dimensions to rotate. Default: all from `rotary_start` on.
      rotary_start: the first of these dimensions.
      scaling: maps of the frequencies.

    Raises:
      TypeError: for positions of another type, and a traced `theta`.
      ValueError: for another shape of x or positions, and as `RoPE`.

    >>> x = jnp.array([1.0, 2.0, 3.0, 4.0]).reshape(1, 1, 1, 4)
    >>> np.asarray(apply_rope(x, jnp.array([1])).ravel()).round(4)
    array([-1.9841,  1.9599,  2.4624,  4.0198], dtype=float32)
    """
    batched = len(x.shape) != 3
    x = x if batched else x[None]
    array_of_rank("rope", "x", x, 4, "[B, T, N, H]")
    rope = RoPE(x.shape[-1], theta, layout, rotary_dim, rotary_start, scaling)
    positions = coordinate_values("rope", positions, "positions")
    positions = positions[None] if positions.ndim == 1 else positions
    require(
        positions.ndim == 2
        and positions.shape[0] in (1, x.shape[0])
        and positions.shape[1] == x.shape[1],
        f"rope: positions must be [T] or [B, T] for x [B, T, N, H] = {x.shape}, got "
        f"{positions.shape}.",
    )
    out = rope.query({}, x, positions)
    return out if batched else out[0]


@dataclasses.dataclass(frozen=True)
class RoPE(ScalableRotary):
    """Rotary position embedding (Su et al. 2021).

    Attributes:
      head_dim: the head dim, H.
      theta: the base of the frequencies.
      layout: the dimensions of a pair; see `posenc_jax.schemes.rotary.layouts`.
      rotary_dim: d, the number of dimensions to rotate. Default: all from `rotary_start` on.
      rotary_start: the first of these dimensions.
      scaling: a map of the frequencies, or a tuple of maps.

    Raises:
      ValueError: for an unknown layout, a rotary dim that is odd or exceeds H, or `theta` not
        positive.
      TypeError: for a traced `theta`, or a `head_dim` that is not an integer.

    >>> RoPE(head_dim=4).query({}, jnp.ones((1, 1, 1, 4)), jnp.array([[0]]))
    Array([[[[1., 1., 1., 1.]]]], dtype=float32)
    """

    name: ClassVar[str] = "rope"
