r"""Short convolution: a causal convolution of q, k and v over a few tokens.

    k'[t] = k[t] + act(sum_{s < width} kernel[width - 1 - s] * k[t - s])

by channel, within a segment, and likewise for q and v. Tokens before the first are zero. The order
of tokens is thus known to attention without another position encoding.

    Canon-B         on="qkv"; Canon layers A, C and D convolve other activations
    Inkling         on="kv", before k is normalised
    DeltaNet, GDN   on="qkv", silu=True, residual=False

This convolves the q, k and v that attention gets: after a layer's QK norm, as in Canon-B. Where a
model normalises after the convolution, or convolves the activations x (Canon-A, before q, k and v
are projected; C and D around the MLP), call `posenc_jax.short_convolution` there and keep its state
with the cache.

The state is the last width - 1 tokens of q, k and v.

Paper: Allen-Zhu. Physics of Language Models: Part 4.1, Architecture Design and the Magic of Canon
Layers. 2025. https://arxiv.org/abs/2512.17351
Reference code: facebookresearch/PhysicsLM4, huggingface/canon_helper.py and
modeling_llama_canon.py; huggingface/transformers, models/inkling/modeling_inkling.py,
InklingShortConvolution.
"""

import dataclasses
from typing import ClassVar

import jax

from posenc_jax.checks import positive_fields, require
from posenc_jax.ops.init import torch_uniform
from posenc_jax.ops.short_conv import short_convolution
from posenc_jax.schemes.scheme import Acts, Scheme, Traits


@dataclasses.dataclass(frozen=True)
class ShortConv(Scheme):
    """A short causal convolution on q, k and v (Allen-Zhu 2025).

    Attributes:
      num_heads: the number of query heads, N.
      num_kv_heads: the number of key/value heads, K.
      head_dim: the head dim, H.
      on: which of q, k and v are convolved, such as "qkv" or "kv".
      width: number of tokens that the convolution reads, the token itself among them.
      residual: whether the convolution is added to its input, rather than replacing it.
      silu: whether SiLU follows the convolution.

    Raises:
      ValueError: for sizes below one, and an `on` that is not some of q, k, v in this order.

    >>> params = ShortConv(num_heads=4, num_kv_heads=2, head_dim=8).init(jax.random.key(0))
    >>> {name: kernel.shape for name, kernel in params.items()}
    {'q': (4, 4, 8), 'k': (4, 2, 8), 'v': (4, 2, 8)}
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    on: str = "qkv"
    width: int = 4
    residual: bool = True
    silu: bool = False
    name: ClassVar[str] = "short_conv"
    traits: ClassVar = Traits(relative=True, order_only=True)

    def __post_init__(self):
        positive_fields(self, "num_heads", "num_kv_heads", "head_dim", "width")
        require(
            bool(self.on) and self.on == "".join(c for c in "qkv" if c in self.on),
            f"short_conv: on must be some of the letters qkv in this order, got {self.on!r}.",
        )

    @property
    def acts(self):
        """q and k, v, or both, by `on`."""
        return (Acts.QK if self.on != "v" else Acts(0)) | (Acts.V if "v" in self.on else Acts(0))

    @property
    def param_axes(self):
        kernel = "width num_kv_heads head_dim"
        return {"q": "width num_heads head_dim", "k": kernel, "v": kernel}

    def init(self, key):
        """Returns the kernels {"q": [width, N, H], "k", "v": [width, K, H]} of the letters in `on`.

        They are initialised as torch.nn.Conv1d.
        """
        keys = dict(zip("qkv", jax.random.split(key, 3), strict=True))
        shapes = {name: (self.width, self._heads(name), self.head_dim) for name in self.on}
        return {
            name: torch_uniform(keys[name], shape, self.width) for name, shape in shapes.items()
        }

    def mix(self, params, q, k, v, segment_ids, state):
        arrays, states = {"q": q, "k": k, "v": v}, {}
        for name in self.on:
            x, heads, dim = arrays[name], self._heads(name), self.head_dim
            require(
                x.shape[2:] == (heads, dim),
                f"short_conv: {name} must be [B, T, {heads}, {dim}], got {x.shape}.",
            )
            old = None if state is None else state[name]
            out, states[name] = short_convolution(x, params[name], segment_ids, old)
            out = jax.nn.silu(out) if self.silu else out
            arrays[name] = x + out if self.residual else out
        return *arrays.values(), states

    def _heads(self, name: str) -> int:
        return self.num_heads if name == "q" else self.num_kv_heads
