r"""M-RoPE: the pairs of RoPE are dealt out to time, row and column of image and video patches.

    angle of pair p = c[axis(p)] w_p,      w_p = theta^(-2p / d),      c = (time, row, column)

The frequencies are those of RoPE; where all three coordinates are the same, as in text, it is
RoPE. `sections` says how many pairs each axis gets, `order` which:

    "contiguous" (default)  t t t h h h w w w    Qwen2-VL, Qwen2.5-VL, GLM-4V
    "interleaved"           t h w t h w t t t    Qwen3-VL: every axis has fast and slow pairs
    "alternating"           h w h w h w t t t    ERNIE 4.5-VL (layout="interleaved"), VideoRoPE

In HoPE, VideoRoPE's pairs of time stand still: `scaling=Clipped(pairs=16, hard=True)`. XD-RoPE
(HunYuan) has four `sections`: place in the sequence, column, row, time. Coordinates are [3, B, T],
as `mrope_coordinates` makes them, or [B, T] for text, where a number stands for all axes. Decoding
goes on from other coordinates than positions: see there.

Papers: Wang et al. Qwen2-VL: Enhancing Vision-Language Model's Perception of the World at Any
Resolution. 2024. https://arxiv.org/abs/2409.12191
Qwen3-VL Technical Report. 2025. https://arxiv.org/abs/2511.21631
VideoRoPE, HoPE. 2025. https://arxiv.org/abs/2502.05173, https://arxiv.org/abs/2505.20444
Reference code: huggingface/transformers, models/qwen2_vl/modeling_qwen2_vl.py, qwen3_vl and
ernie4_5_vl_moe; Wiselnn570/VideoRoPE, videorope-vllm/rotary_embedding.py; hrlics/HoPE,
modeling_hope.py; vllm-project/vllm, rotary_embedding/xdrope.py.
"""

import dataclasses
from typing import ClassVar

from posenc_jax.checks import require
from posenc_jax.rotary.axes import axes_cos_sin
from posenc_jax.rotary.frequencies import FrequencyMap, rope_frequencies
from posenc_jax.rotary.layouts import check_layout, rotary_dims
from posenc_jax.rotary.rotate import apply_rotation
from posenc_jax.scheme import Scheme, Traits

_ORDERS = ("contiguous", "interleaved", "alternating")


def mrope_axes(sections: tuple[int, ...], order: str = "contiguous") -> tuple[int, ...]:
    """Returns the axis that each pair reads: 0 time, 1 row, 2 column.

    Args:
      sections: numbers of pairs for time, row and column; "contiguous" takes any number of axes.
      order: "contiguous", "interleaved" or "alternating"; see the top of the file.

    Raises:
      ValueError: for sections that are not positive numbers, or do not fit the order.

    >>> mrope_axes((4, 2, 2), "interleaved")
    (0, 1, 2, 0, 1, 2, 0, 0)
    """
    require(order in _ORDERS, f"mrope: order must be one of {_ORDERS}, got {order!r}.")
    count = max(len(sections), 3) if order == "contiguous" else 3
    require(
        len(sections) == count and min(sections) >= 1,
        f"mrope: sections must be three positive numbers of pairs{', or more' * (count > 3)}, "
        f"got {sections}.",
    )
    if order == "contiguous":
        return tuple(axis for axis, pairs in enumerate(sections) for _ in range(pairs))
    time, row, column = sections
    if order == "alternating":
        require(
            row == column,
            f"mrope: order 'alternating' needs as many pairs for rows as for columns, "
            f"got sections {sections}.",
        )
        return (1, 2) * row + (0,) * time
    require(
        max(3 * row - 1, 3 * column) <= sum(sections),
        f"mrope: order 'interleaved' has every third pair for rows and for columns; sections "
        f"{sections} ask for more.",
    )
    axes = [0] * sum(sections)
    axes[1 : 3 * row : 3], axes[2 : 3 * column : 3] = [1] * row, [2] * column
    return tuple(axes)


@dataclasses.dataclass(frozen=True)
class MRoPE(Scheme):
    """Multimodal rotary position embedding (Wang et al. 2024).

    Attributes:
      head_dim: H.
      theta: the base of the frequencies.
      sections: numbers of pairs for time, row and column. Default: the shares of Qwen2-VL in
        order "contiguous", those of Qwen3-VL else. More than three for more axes.
      order: "contiguous", "interleaved" or "alternating"; see the top of the file.
      layout: what makes a pair; see `posenc_jax.rotary.layouts`.
      rotary_dim: d, the number of dimensions to rotate; 0 for all from `rotary_start` on.
      rotary_start: the first of them.
      scaling: a map of the frequencies, or a tuple of maps.

    Raises:
      ValueError: for sections that do not add up to d / 2, and as `RoPE`.

    >>> MRoPE(head_dim=128).axes.count(1)
    24
    """

    head_dim: int
    theta: float = 10000.0
    sections: tuple[int, ...] = ()
    order: str = "contiguous"
    layout: str = "half"
    rotary_dim: int = 0
    rotary_start: int = 0
    scaling: FrequencyMap | tuple[FrequencyMap, ...] = FrequencyMap()  # noqa: RUF009, frozen
    name: ClassVar[str] = "mrope"

    def __post_init__(self):
        check_layout("mrope", self.layout)
        require(
            len(self.axes) == self._dim // 2,
            f"mrope: sections must add up to {self._dim // 2} pairs, got {self.sections}.",
        )
        rope_frequencies(self._dim, self.theta, self.scaling)

    @property
    def traits(self):
        return Traits(relative=True, num_axes=max(self.axes) + 1)

    @property
    def _dim(self) -> int:
        return rotary_dims("mrope", self.head_dim, self.rotary_dim, self.rotary_start)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis that each pair reads."""
        pairs = self._dim // 2
        space = 3 * pairs // 8 if self.order == "contiguous" else 5 * pairs // 16
        return mrope_axes(self.sections or (pairs - 2 * space, space, space), self.order)

    def query(self, params, q, coordinates, features=None, tables=None):
        """Returns q [B, T, N, H], rotated."""
        require(
            q.shape[-1] == self.head_dim,
            f"mrope: the scheme is for head_dim {self.head_dim}, got q or k of shape {q.shape}.",
        )
        frequencies, factor = rope_frequencies(self._dim, self.theta, self.scaling)
        cos, sin = axes_cos_sin("mrope", coordinates, self.axes, frequencies)
        if factor != 1.0:
            cos, sin = factor * cos, factor * sin
        return apply_rotation(q, cos, sin, layout=self.layout, start=self.rotary_start)

    def key(self, params, k, coordinates, features=None, tables=None):
        """Returns k [B, S, K, H], rotated."""
        return self.query(params, k, coordinates)
