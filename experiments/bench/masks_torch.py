"""FlexAttention and SDPA of PyTorch on the processor: a part of `masks`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from experiments.bench.peers import Case


def torch_cases(
    function: Callable, arrays: tuple, pairs: np.ndarray, qkv: tuple, backward: bool
) -> dict[str, Case]:
    """Returns calls by name; FlexAttention without the backward pass where it has none.

    Args:
      function, arrays: as in `masks.Pattern`.
      pairs: the mask of all pairs, bool [1, 1, T, T].
      qkv: [1, T, N, H].
      backward: whether to compute gradients.
    """
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    tensors = [torch.from_numpy(np.array(x)).transpose(1, 2).contiguous() for x in qkv]
    captured = [torch.from_numpy(np.asarray(x, np.int64)) for x in arrays]
    length = qkv[0].shape[1]

    def mask_mod(b, h, q, k):
        return function(b, h, q, k, *captured)

    mask = torch.from_numpy(pairs.copy())

    def sdpa(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    blocks = create_block_mask(mask_mod, None, None, length, length, device="cpu")
    compiled = torch.compile(flex_attention)

    def flex(q, k, v):
        return compiled(q, k, v, block_mask=blocks)

    cases = {"torch SDPA, array of pairs": Case(_call(sdpa, tensors, backward), like="here")}
    try:
        call = _call(flex, tensors, backward)
        call()
    except Exception as error:  # Its CPU backend has no backward pass in torch 2.13.
        print(f"  torch FlexAttention: {str(error).strip().splitlines()[-1]:.100}", flush=True)
        return cases
    return cases | {"torch FlexAttention": Case(call, like="here")}


def _call(f: Callable, tensors: list, backward: bool) -> Callable[[], Any]:
    """Returns a call that gives NumPy arrays [1, T, N, H]: the output, and the gradients."""

    import torch

    def numpy(x):
        return x.detach().transpose(1, 2).numpy()

    def forward():
        with torch.no_grad():
            return numpy(f(*tensors))

    def both():
        arguments = [x.detach().requires_grad_() for x in tensors]
        out = f(*arguments)
        grads = torch.autograd.grad(out, arguments, out.detach())
        return numpy(out), tuple(map(numpy, grads))

    return both if backward else forward
