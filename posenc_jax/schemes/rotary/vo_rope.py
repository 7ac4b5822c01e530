r"""RoPE on values: values are rotated by their position, and the output back by the query's.

    out_i = R(-i) sum_j a_ij R(j) v_j = sum_j a_ij R(j - i) v_j

so that each value reaches the query rotated by its distance. A model whose keys and values are one
array needs it, as the rotation of k is in v too: DeepSeek-V4 has 64 of 512 dimensions rotated, in
the interleaved layout, `VORoPE(head_dim=512, layout="interleaved", rotary_dim=64,
rotary_start=448)`, with k and v the same single head. q and k are rotated as by `RoPE`; with
`qk=False` they are not.

v has the head dim of q and k. The rotated v is cached. A map that multiplies cos and sin by a
factor (YaRN) needs `attention_factor=1`, as DeepSeek-V4 has: here it would multiply the output.

Paper: DeepSeek-AI. DeepSeek-V4. 2026. https://arxiv.org/abs/2606.19348, section 2.3.3.
Reference code: DeepSeek-V4's inference/model.py, Attention, apply_rotary_emb(inverse=True);
huggingface/transformers, models/deepseek_v4/modeling_deepseek_v4.py.
"""

import dataclasses
from typing import ClassVar

from posenc_jax.checks import require
from posenc_jax.schemes.rotary.base import ScalableRotary
from posenc_jax.schemes.scheme import Acts


@dataclasses.dataclass(frozen=True)
class VORoPE(ScalableRotary):
    """RoPE on q, k and v, whose output is rotated back (DeepSeek-V4, 2026).

    Attributes:
      head_dim, theta, layout, rotary_dim, rotary_start, scaling: as in `RoPE`.
      qk: whether q and k are rotated too.

    Raises:
      ValueError: for the layout "interleaved_to_half", a scaling with an attention factor other
        than one, and as `RoPE`.

    >>> import jax.numpy as jnp
    >>> scheme, positions = VORoPE(head_dim=4), jnp.arange(3)[None]
    >>> v = jnp.ones((1, 3, 1, 4))
    >>> out = scheme.output({}, scheme.value({}, v, positions), positions)
    >>> bool(jnp.allclose(out, v, atol=1e-6))
    True
    """

    qk: bool = True
    name: ClassVar[str] = "vo_rope"

    def __post_init__(self):
        super().__post_init__()
        require(
            self.layout != "interleaved_to_half",
            "vo_rope: layout must write the dimensions that it reads, as the output is rotated "
            "back, got 'interleaved_to_half'.",
        )
        factor = self.attention_factor
        require(
            factor == 1.0,
            f"vo_rope: scaling must have an attention factor of 1, as it would multiply values and "
            f"the output; got {factor} of {self.scaling}.",
        )

    @property
    def acts(self):
        """v and the output, and q and k with `qk`."""
        return Acts.V | Acts.OUTPUT | (Acts.QK if self.qk else Acts(0))

    def query(self, params, q, coordinates, features=None, tables=None):
        return super().query(params, q, coordinates, features, tables) if self.qk else q

    def key(self, params, k, coordinates, features=None, tables=None):
        return super().key(params, k, coordinates, features, tables) if self.qk else k

    def value(self, params, v, coordinates, features=None, tables=None):
        return super().key(params, v, coordinates, features, tables)

    def output(self, params, out, coordinates, features=None, tables=None):
        """Returns attention's output [B, T, N, H], rotated by minus the query's angle."""
        cos, sin = self.tables(params, coordinates) if tables is None else tables
        return self.rotate(out, (cos, -sin))
