r"""Partial Key Offset: each key takes some dimensions from the key before it.

    k'[j, d] = k[j - 1, d]    for d >= start and j not the first token of its segment
    k'[j, d] = k[j, d]        otherwise

A query that resembles k[j - 1] there finds the token that followed it, so one layer suffices for
induction, which otherwise takes two. `start` is H / 2 by default: modded-nanogpt rotates the other
half, `chain(RoPE(head_dim=H, rotary_dim=H // 2), PartialKeyOffset(head_dim=H))`, after normalising
q and k, and has this in layers with a long window only. In a chain with a scheme that rotates
shifted dimensions as well, keys are shifted first.

The state is one key per sequence. The published code shifts a packed row as a whole, so that the
first token of each document gets dimensions of the document before it; here it is unchanged, as is
the first token of a row there.

Paper: none; the code is by Larry Dial, 2025. Induction is described by Olsson et al.
In-context Learning and Induction Heads. 2022. https://arxiv.org/abs/2209.11895
Reference code: KellerJordan/modded-nanogpt, train_gpt.py, CausalSelfAttention.
"""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from posenc_jax.checks import integers, positive_fields, require
from posenc_jax.ops.short_conv import preceding_tokens
from posenc_jax.schemes.scheme import Scheme, Traits


@dataclasses.dataclass(frozen=True)
class PartialKeyOffset(Scheme):
    """Keys shifted by one token in some dimensions (modded-nanogpt, 2025).

    Attributes:
      head_dim: the head dim, H.
      start: the first of the shifted dimensions, from 1 on. Default: H // 2.

    Raises:
      ValueError: for a head dim below two, or a `start` outside of [1, H).

    >>> k = jnp.arange(6.0).reshape(1, 3, 1, 2)
    >>> PartialKeyOffset(head_dim=2).mix({}, k, k, k, None, None)[1][0, :, 0]
    Array([[0., 1.],
           [2., 1.],
           [4., 3.]], dtype=float32)
    """

    head_dim: int
    start: int | None = None
    name: ClassVar[str] = "partial_key_offset"
    traits: ClassVar = Traits(relative=True, order_only=True)

    def __post_init__(self):
        positive_fields(self, "head_dim")
        integers("partial_key_offset", start=self._start)
        require(
            1 <= self._start < self.head_dim,
            f"partial_key_offset: start must be a dimension of a head of head_dim={self.head_dim} "
            f">= 2, from 1 on, got {self.start}.",
        )

    def mix(self, params, q, k, v, segment_ids, state):
        require(
            k.shape[-1] == self.head_dim,
            f"partial_key_offset: the scheme is for head_dim {self.head_dim}, got k of shape "
            f"{k.shape}.",
        )
        unchanged, shifted = jnp.split(k, [self._start], -1)
        [(before, has)], state = preceding_tokens(shifted, segment_ids, state, 1)
        shifted = jnp.where(has[:, :, None, None], before, shifted)
        return q, jnp.concatenate([unchanged, shifted], -1), v, state

    @property
    def _start(self) -> int:
        return self.head_dim // 2 if self.start is None else self.start
