r"""DAPE: a bias adapted to content by a network over the logits of all heads.

    s = q_i . k_j / sqrt(H) for all heads,  b = their bias from positions
    logits[i, j] = s + b + W2 LeakyReLU(W1 [s, b] + c)

For each pair of tokens, a small network reads the logits and the biases of all N heads and
adds one number per head, so that content can override the penalty on distance. LeakyReLU has
the slope 0.01 below zero. The authors' last layer adds a constant per head, which cancels in
the softmax; it is omitted.

The bias is KERPLE's, the best in the paper, or ALiBi's. The third bias of the authors, FIRE, has
LeakyReLU in this code and ReLU elsewhere; it is not supported. The network mixes heads, so heads
sharded over devices must communicate their logits. Version 2, which convolves along the keys,
is another scheme.

Paper: Zheng et al. DAPE: Data-Adaptive Positional Encoding for Length Extrapolation. 2024.
https://arxiv.org/abs/2405.14722
Reference code: chuanyang-Zheng/DAPE, DAPE.py, AliBi_DAPE and ParallelKerpleLog_DAPE.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from posenc_jax.checks import one_of, positive_fields
from posenc_jax.engine.rule import added_logits
from posenc_jax.engine.rules import LogitBias, LogitsTransform
from posenc_jax.ops.init import torch_uniforms
from posenc_jax.schemes.bias.alibi import ALiBi
from posenc_jax.schemes.bias.kerple import KERPLELog
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class _AddBiasAndNetwork:
    """The transform of one query's logits, [N, S]: adds the bias and the network's output."""

    bias: Callable

    def __call__(self, shared, heads, q_feature, k_feature, logits, seen, q, k):
        shared_by_bias, network = shared
        rule = LogitBias(self.bias, heads, shared_by_bias, relative=True)
        bias: Any = added_logits(rule, q[None, None], k[None])
        bias = bias[0, :, 0]
        inputs = jnp.concatenate([logits, bias])
        hidden = jnp.dot(network["in"], inputs, precision="highest")
        hidden = jax.nn.leaky_relu(hidden + network["in_bias"][:, None])
        return logits + bias + jnp.dot(network["out"], hidden, precision="highest")


@dataclasses.dataclass(frozen=True)
class DAPE(Scheme):
    """Data-adaptive position encoding (Zheng et al. 2024).

    Attributes:
      num_heads: the number of query heads, N.
      base: the bias that is adapted, "kerple" or "alibi".
      width: number of hidden units.

    Raises:
      ValueError: for an unknown base, or sizes below one.

    >>> params = DAPE(num_heads=8).init(jax.random.key(0))
    >>> params["in"].shape, params["out"].shape
    ((32, 16), (8, 32))
    """

    num_heads: int
    base: str = "kerple"
    width: int = 32
    name: ClassVar[str] = "dape"
    traits: ClassVar = Traits(relative=True, transforms_rows=True, mirrored=True)

    def __post_init__(self):
        positive_fields(self, "num_heads", "width")
        one_of("dape", ("kerple", "alibi"), base=self.base)

    @property
    def _base(self):
        return {"kerple": KERPLELog, "alibi": ALiBi}[self.base](self.num_heads)

    @property
    def param_axes(self):
        return {"base": self._base.param_axes, "out": "num_heads width"}

    def init(self, key):
        """Returns {"base": parameters of the bias, "in", "in_bias", "out": of the network}.

        Kernels are [out, in], initialised as torch.nn.Linear is.
        """
        base, *keys = jax.random.split(key, 4)
        inputs, width = 2 * self.num_heads, self.width
        network = {
            "in": ((width, inputs), inputs),
            "in_bias": ((width,), inputs),
            "out": ((self.num_heads, width), width),
        }
        return {"base": self._base.init(base), **torch_uniforms(keys, network)}

    def rules(self, params, q_features=None, k_features=None):
        bias = self._base.rules(params["base"])
        shared = bias.shared, {name: params[name] for name in ("in", "in_bias", "out")}
        return LogitsTransform(
            _AddBiasAndNetwork(bias.rule), heads=bias.heads, shared=shared, reads_seen_only=True
        )
