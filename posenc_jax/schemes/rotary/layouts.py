r"""Layouts: the dimensions of each pair, the sign of the angle, and conversion of weights.

    layout                  pair p       angle      written to     used by
    "half"                  (p, p + P)    m w_p     (p, p + P)     GPT-NeoX, HF Llama, Gemma
    "interleaved"           (2p, 2p + 1)  m w_p     (2p, 2p + 1)   RoFormer, GPT-J, Meta's Llama
    "half_negative"         (p, p + P)   -m w_p     (p, p + P)     nanochat, GRAPE
    "interleaved_negative"  (2p, 2p + 1) -m w_p     (2p, 2p + 1)   modded-nanogpt
    "interleaved_to_half"   (2p, 2p + 1)  m w_p     (p, p + P)     DeepSeek-V3 in Hugging Face

for P pairs. A checkpoint does not record its layout, and position 0 is the same in all of them: a
wrong layout shows only after a few tokens. Layouts differ by the order of dimensions alone, so
permuting the columns of W_q and W_k gives the same scores in another layout. q, k and cached keys
must have the same layout.

Paper: Su et al. RoFormer: Enhanced Transformer with Rotary Position Embedding. 2021.
https://arxiv.org/abs/2104.09864
Reference code: huggingface/transformers, models/llama/convert_llama_weights_to_hf.py (permute)
and models/deepseek_v3/modeling_deepseek_v3.py; karpathy/nanochat, nanochat/gpt.py.
"""

import jax
import numpy as np

from posenc_jax.checks import integers, one_of, require

_LAYOUTS = (
    "half",
    "interleaved",
    "half_negative",
    "interleaved_negative",
    "interleaved_to_half",
)


def check_layout(caller: str, layout: str) -> None:
    """Raises `ValueError` for an unknown layout."""
    one_of(caller, _LAYOUTS, layout=layout)


def read_and_write(layout: str) -> tuple[str, str, bool]:
    """Returns the layouts of reads and of writes, and whether the angle is -m w.

    >>> read_and_write("interleaved_to_half")
    ('interleaved', 'half', False)
    """
    words = layout.split("_")
    return words[0], "half" if words[-1] == "half" else words[0], words[-1] == "negative"


def _pairs(layout: str, dim: int) -> np.ndarray:
    """Returns the two dimensions [2, P] of each pair, in the order that rotates by +m w."""
    read, _, negative = read_and_write(layout)
    pairs = np.arange(dim).reshape(2, -1) if read == "half" else np.arange(dim).reshape(-1, 2).T
    return pairs[::-1] if negative else pairs


def permute_qk(
    weights: jax.Array,
    source: str,
    target: str,
    *,
    head_dim: int,
    rotary_dim: int | None = None,
    rotary_start: int = 0,
    axis: int = -1,
) -> jax.Array:
    """Returns W_q or W_k for another layout, with unchanged scores.

    Biases and norm scales of q and k are permuted likewise.

    Args:
      weights: [..., N * H] or [..., N, H] along the output axis of the projection.
      source: the layout that the weights were trained with.
      target: the layout of the result.
      head_dim: the head dim, H.
      rotary_dim, rotary_start: as in `RoPE`.
      axis: the axis to permute; 0 for PyTorch's weights.

    Raises:
      ValueError: for an unknown layout, an axis that `weights` lacks or that is not a multiple
        of H, or as `RoPE`.

    >>> permute_qk(np.arange(4), "interleaved", "half", head_dim=4)
    array([0, 2, 1, 3])
    """
    check_layout("permute_qk", source)
    check_layout("permute_qk", target)
    dim = rotary_dims("permute_qk", head_dim, rotary_dim, rotary_start)
    require(
        -weights.ndim <= axis < weights.ndim,
        f"permute_qk: axis must be one of weights of shape {weights.shape}, got {axis}.",
    )
    size, axis = weights.shape[axis], axis % weights.ndim
    require(
        size % head_dim == 0,
        f"permute_qk: axis {axis} of {weights.shape} must be a multiple of head_dim {head_dim}.",
    )
    order = np.arange(head_dim)
    order[rotary_start + _pairs(target, dim)] = rotary_start + _pairs(source, dim)
    order = (np.arange(0, size, head_dim)[:, None] + order).ravel()
    return weights[(slice(None),) * axis + (order,)]


def rotary_dims(caller: str, head_dim: int, rotary_dim: int | None, rotary_start: int) -> int:
    """Returns the number of dimensions to rotate: `rotary_dim`, by default all after the start."""
    least = 0 if rotary_dim is None else rotary_dim
    integers(caller, rotary_dim=least, rotary_start=rotary_start)
    require(
        0 <= least <= head_dim,
        f"{caller}: rotary_dim must be in [0, head_dim={head_dim}], got {rotary_dim}.",
    )
    require(
        0 <= rotary_start <= head_dim - least,
        f"{caller}: rotary_start must be in [0, {head_dim - least}] for head_dim {head_dim} "
        f"and rotary_dim {rotary_dim}, got {rotary_start}.",
    )
    dim = head_dim - rotary_start if rotary_dim is None else rotary_dim
    require(
        dim >= 2 and dim % 2 == 0,
        f"{caller}: rotary dim must be even and positive, got {dim}.",
    )
    return dim
