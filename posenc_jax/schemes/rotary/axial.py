r"""Axial RoPE: part of a head rotates by the row of an image patch, another part by its column.

    angle of pair p of axis a = c[a] w_p,       w_p = theta^(-2p / (d / A)),   p < d / 2A

for A axes: the frequencies of each axis are RoPE's for a head of d / A dimensions. q . k depends
on the offset in rows and the offset in columns. Models differ in other settings:

                          theta  axes    frequencies  layout           coordinates
    RoPE-ViT                100  (1, 0)  "own"        "interleaved"    row and column
    Llama 4                 1e4  (1, 0)  "own"        "interleaved"    both counted from 1
    EVA-02 (timm)           1e4  (0, 1)  "own"        "interleaved"    scaled to the trained size
    Qwen2-VL                1e4  (0, 1)  "own"        "half"           row and column
    DINOv3 (default)        100  (0, 1)  "own"        "half"           centred, in turns
    SAM 2, SAM 3            1e4  (1, 0)  "own"        "interleaved"    scaled to the window
    Gemma 4                 100  (1, 0)  "own"        "half_per_axis"  row and column
    Pixtral                 1e4  (0, 1)  "dealt"      "half"           row and column
    Kimi K2.5               1e4  (1, 0)  "alternating" "half"          row and column

"dealt" assigns the frequencies of one RoPE to the axes in turn, the first to the first axis.
"alternating" has the frequencies of "own", and the first pairs of all axes before the second ones.
"half_per_axis" rotates the part of each axis as a separate head, with pairs (p, p + d / 2A).
Tokens other than patches (CLS, registers) have coordinate 0 and are not rotated.
`grid_coordinates` returns the coordinates of a grid, whole or centred. Coordinates [B, T] apply to
all axes. Parts of unequal size, as in Wan and Flux, are a chain of RoPEs that each read one axis:

    pe.chain(*(pe.on_axis(pe.RoPE(128, layout="interleaved", rotary_dim=d, rotary_start=s), a, 3)
               for a, (d, s) in enumerate([(16, 0), (56, 16), (56, 72)])))          # Flux

Papers: Heo et al. Rotary Position Embedding for Vision Transformer. 2024.
https://arxiv.org/abs/2403.13298
Fang et al. EVA-02. 2023. https://arxiv.org/abs/2303.11331
Simeoni et al. DINOv3. 2025. https://arxiv.org/abs/2508.10104
Reference code: naver-ai/rope-vit, models/vit_rope.py; huggingface/pytorch-image-models,
timm/layers/pos_embed_sincos.py; huggingface/transformers, models/*/modeling_*.py.
"""

import dataclasses
from typing import ClassVar

import numpy as np

from posenc_jax.checks import one_of, require
from posenc_jax.schemes.rotary.base import Rotary, check_heads
from posenc_jax.schemes.rotary.frequencies import rope_frequencies
from posenc_jax.schemes.rotary.multi_axis import axis_per_pair
from posenc_jax.schemes.rotary.rotate import rotate_pairs
from posenc_jax.schemes.scheme import Traits


@dataclasses.dataclass(frozen=True)
class AxialRoPE(Rotary):
    """Rotary position embedding of images, axis by axis (Heo et al. 2024).

    Attributes:
      head_dim: the head dim, H.
      theta: the base of the frequencies.
      axes: which axis of the coordinates each part of the head reads, in the order of the parts.
      frequencies: "own" for each axis; "dealt" from one RoPE; or "alternating", those of "own"
        with pairs that read the axes in turn.
      layout: the dimensions of a pair: "half_per_axis", or see `posenc_jax.schemes.rotary.layouts`.
      rotary_dim: d, the number of leading dimensions to rotate. Default: all.

    Raises:
      ValueError: for a rotary dim that is not a multiple of 2A, or an unknown word.

    >>> q = jnp.ones((1, 6, 2, 8))
    >>> AxialRoPE(head_dim=8).query({}, q, pe.grid_coordinates(1, 2, 3)).shape
    (1, 6, 2, 8)
    """

    head_dim: int
    theta: float = 100.0
    axes: tuple[int, ...] = (0, 1)
    frequencies: str = "own"
    layout: str = "half"
    rotary_dim: int | None = None
    name: ClassVar[str] = "axial_rope"

    def __post_init__(self):
        super().__post_init__()
        require(
            len(self.axes) > 0 and min(self.axes) >= 0,
            f"axial_rope: axes must be numbers of coordinate axes, got {self.axes}.",
        )
        _ = self._frequencies  # Raises for an invalid number of dimensions or word.

    def _check_layout(self):
        if self.layout != "half_per_axis":
            super()._check_layout()

    @property
    def traits(self):
        return Traits(relative=True, num_axes=max(self.axes) + 1)

    @property
    def _frequencies(self) -> np.ndarray:
        """Radians per unit, float64 [A, d / 2A], of the pairs of each axis."""
        one_of("axial_rope", ("own", "dealt", "alternating"), frequencies=self.frequencies)
        require(
            self.frequencies != "alternating" or self.layout != "half_per_axis",
            "axial_rope: with layout='half_per_axis' each axis has a part of the head, got "
            "frequencies='alternating'.",
        )
        dim, num_axes = self.num_rotated, len(self.axes)
        require(
            dim % (2 * num_axes) == 0,
            f"axial_rope: {num_axes} axes need a multiple of {2 * num_axes} dimensions, got {dim}; "
            "parts of unequal size are a chain of on_axis(RoPE(rotary_dim=, rotary_start=), axis).",
        )
        if self.frequencies == "dealt":
            return rope_frequencies(dim, self.theta)[0].reshape(-1, num_axes).T
        return np.tile(rope_frequencies(dim // num_axes, self.theta)[0], (num_axes, 1))

    def cos_sin(self, params, coordinates):
        frequencies = self._frequencies
        axes = np.broadcast_to(np.array(self.axes)[:, None], frequencies.shape)
        if self.frequencies == "alternating":
            axes, frequencies = axes.T, frequencies.T
        return axis_per_pair(coordinates, axes.ravel().tolist(), frequencies.ravel())

    def rotate(self, x, tables):
        if self.layout != "half_per_axis":
            return super().rotate(x, tables)
        check_heads(self.name, x, self.head_dim)
        num_axes, pairs = self._frequencies.shape
        for i in range(num_axes):
            part = [table[..., i * pairs : (i + 1) * pairs] for table in tables]
            x = rotate_pairs(x, *part, layout="half", start=2 * i * pairs)
        return x
