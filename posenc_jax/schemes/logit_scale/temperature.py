r"""Query temperature: a query is multiplied by a factor that grows with its position.

    q_i -> t(i) q_i,        i counts from 0, L is `length` and s is `strength`

    form              t(i)                              where
    "log_n"           ln(i + 1) / ln L                  Su 2021, BiPE
    "log_n_clipped"   max(ln(i + 1) / ln L, 1)          ReRoPE, Self-Extend
    "llama4"          1 + s ln(1 + floor((i + 1) / L))  Llama 4, in layers without RoPE
    "ministral3"      1 + s ln(1 + floor(i / L))        Ministral 3, Mistral 4
    "beam"            (1 + (i + 1) / L)^s               Beam, in layers without RoPE
    "inkling"         1 + s ln(max((i + 1) / L, 1))     Inkling

so that attention over many keys is as sharp as over few. Combine it with any scheme by `chain`. In
a packed batch it restarts with the positions. Inkling also multiplies its learned logits by t(i);
this scheme multiplies q alone. `SSMax` is the learned form of Scalable-Softmax.

Paper: Nakanishi. Scalable-Softmax Is Superior for Attention. 2025.
https://arxiv.org/abs/2501.19399
Reference code: bojone/rerope, rerope_patch.py; huggingface/transformers 5.23, models/llama4,
ministral3, beam and inkling.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from posenc_jax.checks import coordinate_values, finite, integers_from, one_of, require
from posenc_jax.schemes.scheme import Scheme, Traits

_LOG_N = ("log_n", "log_n_clipped")
_FORMS = (*_LOG_N, "llama4", "ministral3", "beam", "inkling")


def query_temperature(
    positions: jax.Array, form: str, length: int, strength: float = 0.1
) -> jax.Array:
    """Returns the factors of queries, float32 of the shape of `positions`.

    >>> query_temperature(jnp.array([8190, 8191]), "llama4", 8192)
    Array([1.       , 1.0693147], dtype=float32)
    """
    one_of("temperature", _FORMS, form=form)
    positions = coordinate_values("temperature", positions, "positions")
    count = positions.astype(jnp.float32) + 1.0
    if form in _LOG_N:
        out = jnp.log(count) / np.float32(np.log(length))
        return out if form == "log_n" else jnp.maximum(out, 1.0)
    if form in ("llama4", "ministral3"):  # Whole numbers: a rounded quotient may be one off.
        steps = positions // length
        if form == "llama4":  # (positions + 1) // length, which would overflow.
            steps += (positions % length >= length - 1).astype(steps.dtype)
        return 1.0 + strength * jnp.log1p(steps.astype(jnp.float32))
    if form == "beam":
        return jnp.exp(strength * jnp.log1p(count / length))
    return 1.0 + strength * jnp.log(jnp.maximum(count / length, 1.0))


@dataclasses.dataclass(frozen=True)
class QueryTemperature(Scheme):
    """A temperature on queries, by one of six formulas (Su 2021 and later).

    Attributes:
      form: "log_n", "log_n_clipped", "llama4", "ministral3", "beam" or "inkling".
      length: L, the trained length, or the unit of positions in the formula.
      strength: s. Default: 0.1, as in all released models; "log_n" and "log_n_clipped" have none.

    Raises:
      TypeError: for a length that is not an integer.
      ValueError: for an unknown form, a length too small, a strength that is not finite, or a
        strength for a form without one.

    >>> QueryTemperature(length=4).query({}, jnp.ones((1, 1, 1, 1)), jnp.array([[15]])).item()
    2.0
    """

    form: str = "log_n"
    length: int = 4096
    strength: float | None = None
    name: ClassVar[str] = "temperature"
    traits: ClassVar = Traits(norm_after=False)

    def __post_init__(self):
        one_of("temperature", _FORMS, form=self.form)
        least = 2 if self.form in _LOG_N else 1  # ln 1 is zero.
        integers_from(least, "temperature", length=self.length)
        require(
            self.strength is None or self.form not in _LOG_N,
            f"temperature: {self.form!r} has no strength, got strength={self.strength}.",
        )
        finite("temperature", strength=self.strength or 0.0)

    def query(self, params, q, coordinates, features=None, tables=None):
        strength = 0.1 if self.strength is None else self.strength
        t = query_temperature(coordinates, self.form, self.length, strength)
        return (q.astype(jnp.float32) * t[:, :, None, None]).astype(q.dtype)
