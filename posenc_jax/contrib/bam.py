r"""BAM: the logarithm of a generalized Gaussian prior on the distance, learned per head.

    logits[n, i, j] = q_i . k_j / sqrt(H) - exp(scale[n]) (|j - i - m[n]| + e)^shape[n]
    m[n] = exp(loc[n]) - exp(-loc[n]),     e = 1e-5

Shape 1 and location 0 are ALiBi with slopes exp(scale), as it is initialised; shape 2 is a
Gaussian, and shape 0 adds a constant. Below zero, far keys are preferred to near ones. With
`scale_inside` the scale is within the power, (exp(scale) |j - i - m| + e)^shape, as in the authors'
file for evaluation; their file for training has it outside. The two agree for shape 1.

The authors' models share one prior between all layers, and pair it with scalable softmax:
`chain(BAM(...), SSMax(...))`. The location is 0 and not learned by default in their classes, and
learned by their script; here it is learned with `learn_location`.

Without causality nothing tells past from future unless locations are learned: outputs for the
reversed sequence are the same, reversed.

Paper: Bianchessi et al. Bayesian Attention Mechanism: A Probabilistic Framework for Positional
Encoding and Context Length Extrapolation. 2025. https://arxiv.org/abs/2505.22842
Reference code: ArthurSBianchessi/BAM, models/bam.py and inference_models/bam.py, AttentionPrior.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.checks import positive_fields
from posenc_jax.engine.rules import LogitBias
from posenc_jax.schemes.bias.alibi import alibi_slopes
from posenc_jax.schemes.scheme import Scheme, Traits

EPSILON = 1e-5


@dataclasses.dataclass(frozen=True)
class _LogPrior:
    """The logarithm of the prior for one pair, up to a constant."""

    scale_inside: bool

    def __call__(self, shared, head, q, k):
        scale, shape, location = head
        distance = (k - q).astype(jnp.float32) - location
        if self.scale_inside:
            return -((jnp.abs(distance * scale) + EPSILON) ** shape)
        return -((jnp.abs(distance) + EPSILON) ** shape) * scale


@dataclasses.dataclass(frozen=True)
class BAM(Scheme):
    """Bayesian attention mechanism with a generalized Gaussian prior (Bianchessi et al. 2025).

    Attributes:
      num_heads: the number of query heads, N.
      learn_location: whether heads learn where their prior is centred, from zero.
      scale_inside: whether the scale is within the power; see the formulas.
      initial_shape: the initial shape.

    >>> scheme = BAM(num_heads=1)
    >>> scheme.rules(scheme.init(None)).dense(jnp.array([2]), jnp.arange(3)).round(4)
    Array([[[-0.0078, -0.0039, -0.    ]]], dtype=float32)
    """

    num_heads: int
    learn_location: bool = False
    scale_inside: bool = False
    initial_shape: float = 1.0
    name: ClassVar[str] = "bam"
    param_axes: ClassVar = {"scale": "num_heads", "shape": "num_heads", "loc": "num_heads"}

    @property
    def traits(self):
        mirrored = not self.learn_location
        return Traits(relative=True, shared_over_layers=True, mirrored=mirrored)

    def __post_init__(self):
        positive_fields(self, "num_heads")

    def init(self, key):
        """Returns {"scale": logarithms of ALiBi's slopes, "shape"}, and "loc", float32 [N] each."""
        shape = jnp.full(self.num_heads, self.initial_shape, jnp.float32)
        params = {"scale": jnp.log(alibi_slopes(self.num_heads)), "shape": shape}
        return params | ({"loc": jnp.zeros_like(shape)} if self.learn_location else {})

    def rules(self, params, q_features=None, k_features=None):
        params = {name: x.astype(jnp.float32) for name, x in params.items()}
        shape = params["shape"]
        location = 2.0 * jnp.sinh(params["loc"]) if self.learn_location else jnp.zeros_like(shape)
        heads = jnp.exp(params["scale"]), shape, location
        return LogitBias(_LogPrior(self.scale_inside), heads=heads, relative=True)
