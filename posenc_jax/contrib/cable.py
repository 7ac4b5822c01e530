r"""CABLE: a bias per token and head that accumulates along the sequence.

    logits[n, i, j] = q_i . k_j - |c[n, i] - c[n, j]|
    c[n, t] = -sum_{s <= t} softplus(w_n . x_s + b_n)

As log sigmoid(z) = -softplus(-z), this is FoX with the signs of w and b flipped. The file of FoX
describes sums, padding, and attention in both directions, which the authors' code does not have.
The released code divides q . k by sqrt(C / C) = 1: its checkpoints need scale=1.0.

Paper: Veisi et al. Context-aware Biases for Length Extrapolation. 2025.
https://arxiv.org/abs/2503.08067
Reference code: axiomlab/Cable, src/Cable.py.
"""

import dataclasses
from typing import ClassVar

import jax

from posenc_jax.checks import positive_fields
from posenc_jax.schemes.content.fox import FoX
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class CABLE(Scheme):
    """Context-aware biases (Veisi et al. 2025).

    Checkpoints of the released code need a layer with scale=1.0.

    Attributes:
      num_heads: the number of query heads, N.
      model_dim: the model dim, D.

    >>> CABLE(num_heads=2, model_dim=8).init(jax.random.key(0))["w"].shape
    (8, 2)
    """

    num_heads: int
    model_dim: int
    name: ClassVar[str] = "cable"
    param_axes: ClassVar = FoX.param_axes
    traits: ClassVar = Traits(relative=True, order_only=True, reads_x=True)

    def __post_init__(self):
        positive_fields(self, "num_heads", "model_dim")

    def init(self, key):
        """Returns {"w": normal [D, N] of deviation 0.02, "b": zeros [N]}."""
        return self._fox.init(key)

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns c for queries and -c for keys, [B, T, N]."""
        negated = jax.tree.map(lambda a: -a, params)
        return self._fox.features(negated, x, q, k, coordinates, segment_ids, state)

    def rules(self, params, q_features=None, k_features=None):
        return self._fox.rules(params, q_features, k_features)

    @property
    def _fox(self) -> FoX:
        return FoX(self.num_heads, self.model_dim)
