r"""RePo: RoPE at positions that are predicted from content.

    z[t] = W (silu(G x_t) * C x_t)       a real number per head; G, C: D -> D / 8
    q, k rotate by z[t] w_p              w_p as in RoPE

Coordinates are not read: the order of tokens enters by the causal mask alone, and the authors
keep RoPE in the first layers (5 of 16) and have a z per head. The z of a key is cached with it,
`groups` numbers, though only `key` reads it.

Angles are float32 products: z is small, unlike token positions.

Paper: Li et al. RePo: Language Models with Context Re-Positioning. 2025.
https://arxiv.org/abs/2512.14391
Reference code: SakanaAI/repo, OLMo/olmo/model.py, dynamic_position_encoding_swigluex_multihead.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.angles import cos_sin
from posenc_jax.checks import activations, positive_fields, require
from posenc_jax.ops.init import normals
from posenc_jax.schemes.rotary.base import ContentRotary


@dataclasses.dataclass(frozen=True)
class RePo(ContentRotary):
    """RoPE at positions that are predicted from content (Li et al. 2025).

    Attributes:
      head_dim: the head dim, H.
      model_dim: the model dim, D.
      groups: the number of sets of positions for consecutive heads; it divides the number of key
        heads.
      width: the width of the gated layer. Default: D / 8.
      theta: the base of the frequencies.
      layout: the dimensions of a pair; see `posenc_jax.schemes.rotary.layouts`.
      init_std: the standard deviation of the initial weights.

    Raises:
      ValueError: for sizes out of range, or an unknown layout.

    >>> RePo(head_dim=4, model_dim=16).init(jax.random.key(0))["out"].shape
    (2, 1)
    """

    model_dim: int
    groups: int = 1
    width: int | None = None
    theta: float = 10000.0
    layout: str = "half"
    init_std: float = 0.02
    name: ClassVar[str] = "repo"
    traits: ClassVar = dataclasses.replace(ContentRotary.traits, mirrored=True)
    param_axes: ClassVar = {"gate": "model_dim width", "content": "model_dim width"}

    def __post_init__(self):
        super().__post_init__()
        positive_fields(self, "model_dim")
        require(
            self.width is not None or self.model_dim >= 8,
            f"repo: model_dim={self.model_dim} is below 8; give a width.",
        )
        if self.width is not None:
            positive_fields(self, "width")

    def init(self, key):
        """Returns {"gate": [D, width], "content": [D, width], "out": [width, groups]}; normal."""
        width = self.model_dim // 8 if self.width is None else self.width
        wide = self.model_dim, width
        shapes = {"gate": wide, "content": wide, "out": (width, self.groups)}
        return normals(jax.random.split(key, 3), self.init_std, shapes)

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns the positions z, float32 [B, T, groups], for queries and for keys."""
        x = activations(self.name, x, self.model_dim, "angles")
        gate, content = (
            jnp.dot(x, params[name], precision="highest") for name in ("gate", "content")
        )
        z = jnp.dot(jax.nn.silu(gate) * content, params["out"], precision="highest")
        return z, z, state

    def cos_sin(self, params, coordinates):
        """Returns the tables [B, T, groups, P] of positions z [B, T, groups]."""
        return cos_sin(coordinates, self.base_frequencies)
