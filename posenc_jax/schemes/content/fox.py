r"""FoX, the forgetting transformer: a forget gate per token and head decays the past.

    logits[n, i, j] = q_i . k_j / sqrt(H) - |c[n, i] - c[n, j]|
    c[n, t] = sum_{s <= t} log f[n, s],     f[n, t] = sigmoid(w_n . x_t + b_n)

so that the weight of a key is multiplied by all gates after it. This is ALiBi with a slope,
-log f, that depends on the token; x-transformers calls it data-dependent ALiBi and initialises
b = 5, almost no decay; the authors have b = 0. No other position encoding is needed.

The paper is causal, where |c_i - c_j| = c_j - c_i. The symmetric form used here is the same there,
and decays in both directions where attention is bidirectional.

    gate="full" (default)   f depends on the token
    gate="bias"             one learned f per head: ALiBi with learned slopes
    gate="fixed"            one fixed f per head

Without w, heads are initialised with f = exp(-1 / t), for decay times t spaced geometrically from
`min_time` to `max_time`. The authors can also initialise "bias" with f = 1/2 in every head.

The state is one float32 sum per head. Padding does not contribute to it, and it need not restart
between packed sequences, as only differences within a sequence are used. It grows in magnitude with
length, to -3e5 after 64 thousand tokens of log f = -5; differences are then exact to 0.03, as
in the authors' kernels.

Paper: Lin et al. Forgetting Transformer: Softmax Attention with a Forget Gate. 2025.
https://arxiv.org/abs/2503.02130
Reference code: zhixuan-lin/forgetting-transformer, ops/forgetting_attention.py and
model/forgetting_transformer/modeling_forgetting_transformer.py; lucidrains/x-transformers,
x_transformers.py, DataDependentAlibi.
"""

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import activations, finite, one_of, positive_fields, require
from posenc_jax.engine.rules import SeparableBias
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class FoX(Scheme):
    """Forget gates of the forgetting transformer (Lin et al. 2025).

    Attributes:
      num_heads: the number of query heads, N.
      model_dim: the model dim, D.
      gate: "full", "bias" or "fixed"; see the formulas.
      init_bias: initial b of gate="full".
      min_time: shortest initial decay time of the other gates, in tokens.
      max_time: longest initial decay time, in tokens.

    Raises:
      ValueError: for sizes below one, an unknown gate, or options of another gate.

    >>> FoX(num_heads=2, model_dim=8).init(jax.random.key(0))["w"].shape
    (8, 2)
    """

    num_heads: int
    model_dim: int
    gate: str = "full"
    init_bias: float = 0.0
    min_time: float | None = None
    max_time: float | None = None
    name: ClassVar[str] = "fox"
    param_axes: ClassVar = {"w": "model_dim num_heads", "b": "num_heads"}

    @property
    def traits(self):
        """Static facts; mirrored with gates that do not read the token."""
        mirrored = self.gate != "full"
        return Traits(relative=True, order_only=True, reads_x=True, mirrored=mirrored)

    def __post_init__(self):
        positive_fields(self, "num_heads", "model_dim")
        one_of("fox", ("full", "bias", "fixed"), gate=self.gate)
        times = (self.min_time, self.max_time)
        if self.gate == "full":
            finite("fox", init_bias=self.init_bias)
            require(times == (None, None), f'fox: gate="full" has no decay times, got {times}.')
            return
        low, high = self._times
        require(
            0 < low <= high < math.inf,
            f"fox: gate={self.gate!r} needs 0 < min_time <= max_time, got {times}.",
        )
        require(
            self.init_bias == 0.0,
            f"fox: gate={self.gate!r} starts from its times, not from init_bias={self.init_bias}.",
        )

    def init(self, key):
        """Returns {"w": normal [D, N], "b": [N]} for "full", {"b"} for "bias", {} for "fixed"."""
        if self.gate == "fixed":
            return {}
        if self.gate == "bias":
            return {"b": self._bias()}
        w = 0.02 * jax.random.normal(key, (self.model_dim, self.num_heads), jnp.float32)
        return {"w": w, "b": jnp.full(self.num_heads, self.init_bias, jnp.float32)}

    def features(self, params, x, q, k, coordinates, segment_ids, state):
        """Returns c, the cumulative sums of log f, for queries and -c for keys, [B, T, N]."""
        log_f = jax.nn.log_sigmoid(self._logits(params, x, q))
        if segment_ids is not None:
            log_f = jnp.where((segment_ids >= 0)[:, :, None], log_f, 0.0)
        sums = jnp.cumsum(log_f, axis=1)
        if state is not None:
            sums += state[:, None]
        if not sums.shape[1]:
            return sums, -sums, sums.sum(1) if state is None else state
        return sums, -sums, sums[:, -1]

    def rules(self, params, q_features=None, k_features=None):
        return SeparableBias(q_features=q_features, k_features=k_features, symmetric=True)

    @property
    def _times(self) -> tuple[float, float]:
        low, high = (0.0 if time is None else time for time in (self.min_time, self.max_time))
        return low, high

    def _bias(self):
        rates = 1 / np.geomspace(*self._times, self.num_heads)
        return jnp.asarray(-rates - np.log(-np.expm1(-rates)), jnp.float32)  # -log(e^rate - 1)

    def _logits(self, params, x, q):
        if self.gate != "full":
            b = params["b"] if self.gate == "bias" else self._bias()
            return jnp.broadcast_to(b, (*q.shape[:2], self.num_heads))
        x = activations("fox", x, self.model_dim, "gates")
        logits = jnp.dot(x, params["w"], precision="highest")
        return logits + params["b"][None, None]
