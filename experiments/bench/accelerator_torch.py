"""Attention of PyTorch on the same card: a part of `accelerator`.

SDPA by cuDNN and by flash attention, and FlexAttention, compiled, without a bias, with ALiBi and
with a learned table of T5. Sizes and the count of FLOP are as in `accelerator_times`. Each
is compared with float32 at T = 512, with its gradients, before it is timed.
"""

import argparse
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

import posenc_jax as pe
from experiments.bench.accelerator_times import BOTH, FORWARD, line
from experiments.bench.cases import positives
from experiments.runs.files import to_json, write_whole

TOKENS, HEADS, DIM = 16384, 16, 128
LIMIT = 0.03
"""The greatest error of the output and of gradients."""
SMALL = {f"bwd_BLOCK_{name}": 32 for name in ("M1", "N1", "M2", "N2")}
"""Blocks of FlexAttention where those by default do not fit in shared memory."""
SDPA = {"sdpa cudnn": SDPBackend.CUDNN_ATTENTION, "sdpa flash": SDPBackend.FLASH_ATTENTION}
CASES = [*(("none", by) for by in SDPA), *((rule, "flex") for rule in ("none", "alibi", "t5"))]


def attention(
    rule: str, by: str, length: int, table: Any, blocks: dict[str, int]
) -> tuple[Callable, Callable]:
    """Returns causal attention [B, N, T, H] of q, k and v, and the bias [N, T, T] of a table."""
    device = table.device
    bucket = torch.from_numpy(np.array(pe.t5_bucket(jnp.arange(length)))).long().to(device)
    slopes = torch.exp2(-8 * torch.arange(1, HEADS + 1, device=device) / HEADS)
    at = torch.arange(length, device=device)

    def bias(table: Any) -> Any:
        distance, out = (
            (at[:, None] - at).clamp(min=0),
            torch.where(at[:, None] < at, -torch.inf, 0),
        )
        if rule == "alibi":
            return out - slopes[:, None, None] * distance
        return out + table[:, bucket[distance]] if rule == "t5" else out

    def sdpa(q, k, v):
        with sdpa_kernel(SDPA[by]):
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    if by != "flex":
        return sdpa, bias
    torch._dynamo.reset()  # Else earlier cases count against its limit of compilations.
    rules = {
        "alibi": lambda s, b, h, q, k: s - slopes[h] * (q - k),
        "t5": lambda s, b, h, q, k: s + table[h, bucket[(q - k).clamp(min=0)]],
    }
    mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, length, length, device=device)
    flex = torch.compile(flex_attention, dynamic=False)
    options = {"score_mod": rules.get(rule), "block_mask": mask, "kernel_options": blocks or None}
    return functools.partial(flex, **options), bias


def tensors(rule: str, batch: int, length: int, device: str) -> tuple[list[Any], Any]:
    """Returns the parameters, q, k, v and a table of T5, and a cotangent of the output."""
    shape = batch, HEADS, length, DIM
    *qkv, weights = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(4))
    table = 0.5 * torch.randn(HEADS, 32, device=device)
    learned = *qkv, *[table] * (rule == "t5")
    # FlexAttention has no gradients on CPUs.
    return [x.requires_grad_(device == "cuda") for x in learned], weights


def errors(rule: str, by: str, blocks: dict[str, int], device: str) -> list[float]:
    """Returns relative errors of the output and of the gradients, against float32."""
    learned, weights = tensors(rule, 2, 512, device)
    attend, bias = attention(rule, by, 512, learned[-1], blocks)
    wide = [x.detach().float().requires_grad_() for x in learned]
    want = (wide[0] @ wide[1].mT / math.sqrt(DIM) + bias(wide[-1])).softmax(-1) @ wide[2]
    got = attend(*learned[:3])
    pairs = [(got, want)]
    if got.requires_grad:
        grads = torch.autograd.grad(got, learned, weights)
        pairs += zip(grads, torch.autograd.grad(want, wide, weights.float()), strict=True)
    with torch.no_grad():
        return [float(f"{(a.float() - b).norm() / b.norm():.2g}") for a, b in pairs]


def timed(f: Callable[[], Any]) -> float:
    """Returns the median of milliseconds on the card."""
    took = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        f()
        end.record()
        end.synchronize()
        took.append(start.elapsed_time(end))
    return statistics.median(took[3:])


def measure(rule: str, by: str, length: int, blocks: dict[str, int]) -> list[dict[str, Any]]:
    """Returns rows of both passes.

    Raises:
      ValueError: if the numbers are wrong.
    """
    differences = errors(rule, by, blocks, "cuda")
    if not max(differences) < LIMIT:
        raise ValueError(f"errors of the output and the gradients: {differences}")
    batch = max(1, TOKENS // length)
    learned, weights = tensors(rule, batch, length, "cuda")
    attend, _ = attention(rule, by, length, learned[-1], blocks)
    with torch.no_grad():
        forward = timed(lambda: attend(*(x.detach() for x in learned[:3])))
    both = timed(lambda: torch.autograd.grad(attend(*learned[:3]), learned, weights))
    flop = 2.0 * batch * HEADS * length**2 * DIM
    row = {"name": rule, "by": f"torch {by}", "T": length, "errors": differences, **blocks}
    passes = (FORWARD, 1.0, forward), (BOTH, 3.5, both)
    return [row | {"what": x, "ms": ms, "TFLOP/s": n * flop / ms / 1e9} for x, n, ms in passes]


def main(arguments: list[str]) -> int:
    """Measures until the time is over; every case is written at once."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--json", type=Path, required=True, metavar="FILE", help="the rows")
    add("--seconds", type=float, default=60.0, help="(default: 60)")
    add("--lengths", type=positives, default=(4096, 16384), help="T (default: 4096,16384)")
    options = parser.parse_args(arguments)
    end, rows = time.monotonic() + options.seconds, []
    about = {"torch": torch.__version__, "device": torch.cuda.get_device_name()}
    for length, (rule, by) in ((x, case) for x in options.lengths for case in CASES):
        more = [{"name": rule, "by": f"torch {by}", "what": BOTH, "T": length}]
        for blocks in ({}, SMALL) if by == "flex" else ({},):
            if time.monotonic() > end:
                more[0].setdefault("skipped", "out of time")
                break
            try:
                more = measure(rule, by, length, blocks)
                break
            except Exception as error:
                more[0]["error"] = f"{type(error).__name__}: {error}"[:300]
        rows += more
        print(*map(line, more), sep="\n", flush=True)
        write_whole(options.json, to_json(about | {"rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
