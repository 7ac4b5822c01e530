r"""M-RoPE: each pair of RoPE reads time, row or column of image and video patches.

    angle of pair p = c[axis(p)] w_p,      w_p = theta^(-2p / d),      c = (time, row, column)

The frequencies are RoPE's; for tokens with three equal coordinates, as in text, M-RoPE is RoPE.
`sections` is the number of pairs of each axis, `order` their arrangement:

    "contiguous" (default)  t t t h h h w w w    Qwen2-VL, Qwen2.5-VL, GLM-4V
    "interleaved"           t h w t h w t t t    Qwen3-VL: every axis has fast and slow pairs
    "alternating"           h w h w h w t t t    ERNIE 4.5-VL (layout="interleaved"), VideoRoPE

In HoPE, VideoRoPE's pairs of time have frequency zero:
`scaling=ClippedFrequencies(pairs=16, hard=True)`. XD-RoPE (HunYuan) has four `sections`: index in
the sequence, column, row, time. Coordinates are [3, B, T], as `mrope_coordinates` makes them, or
[B, T] for text, the same value on all axes. Coordinates of generated tokens differ from their
positions: see `mrope_coordinates`.

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

from posenc_jax.checks import one_of, require
from posenc_jax.schemes.rotary.base import ScalableRotary
from posenc_jax.schemes.rotary.multi_axis import axis_per_pair
from posenc_jax.schemes.scheme import Traits


def mrope_axes(sections: tuple[int, ...], order: str = "contiguous") -> tuple[int, ...]:
    """Returns the axis that each pair reads: 0 time, 1 row, 2 column.

    >>> mrope_axes((4, 2, 2), "interleaved")
    (0, 1, 2, 0, 1, 2, 0, 0)
    """
    one_of("mrope", ("contiguous", "interleaved", "alternating"), order=order)
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
        f"{sections} need more.",
    )
    axes = [0] * sum(sections)
    axes[1 : 3 * row : 3], axes[2 : 3 * column : 3] = [1] * row, [2] * column
    return tuple(axes)


@dataclasses.dataclass(frozen=True)
class MRoPE(ScalableRotary):
    """Multimodal rotary position embedding (Wang et al. 2024).

    Attributes:
      head_dim, theta, layout, rotary_dim, rotary_start, scaling: as in `RoPE`.
      sections: numbers of pairs for time, row and column. Default: the shares of Qwen2-VL in
        order "contiguous", else of Qwen3-VL. More than three for more axes.
      order: "contiguous", "interleaved" or "alternating"; see the formulas.

    Raises:
      ValueError: for sections that do not add up to d / 2, and as `RoPE`.

    >>> MRoPE(head_dim=128).axes.count(1)
    24
    """

    sections: tuple[int, ...] = ()
    order: str = "contiguous"
    name: ClassVar[str] = "mrope"

    def __post_init__(self):
        super().__post_init__()
        require(
            len(self.axes) == self.num_rotated // 2,
            f"mrope: sections must add up to {self.num_rotated // 2} pairs, got {self.sections}.",
        )

    @property
    def traits(self):
        return Traits(relative=True, num_axes=max(self.axes) + 1)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axis that each pair reads."""
        pairs = self.num_rotated // 2
        space = 3 * pairs // 8 if self.order == "contiguous" else 5 * pairs // 16
        require(
            bool(self.sections) or space > 0,
            f"mrope: {pairs} pairs are too few for the default sections; pass sections=, or a "
            "larger head_dim.",
        )
        return mrope_axes(self.sections or (pairs - 2 * space, space, space), self.order)

    def cos_sin(self, params, coordinates):
        return axis_per_pair(coordinates, self.axes, self.base_frequencies)
