"""Attention with each scheme against the same without positions, and against other libraries.

Causal, forward or forward and backward with the gradients of everything learned. Beside the times
are the memory that the compiled program holds while it runs, and the seconds that compiling it
took. `jax.nn` is given a T5 bias as a matrix, which is how T5 is done there. `--peers` adds torch's
SDPA, with and without such a matrix, where torch is installed.
"""

import argparse
import ast
import dataclasses
import importlib.util
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import posenc_jax as pe
from experiments.bench.clock import show, side_by_side

DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}
TINY = ((32, 128, 4, 32), (16, 256, 4, 32), (8, 512, 4, 32))
OPTIONS = {"shaw": {"values": False}}
"""Unless given: keys alone, as most uses of Shaw's have it."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's settings."""
    parser.add_argument(
        "--lengths", type=_numbers, default=(2048,), help="commas between (default: 2048)"
    )
    parser.add_argument("--batch", type=int, default=1, help="default: 1")
    parser.add_argument("--heads", type=int, default=8, help="default: 8")
    parser.add_argument("--head-dim", type=int, default=64, help="default: 64")
    parser.add_argument("--tiny", action="store_true", help="the shapes of tiny models instead")
    parser.add_argument(
        "--schemes",
        default="t5,alibi,shaw",
        help="names, with options as in shaw:clip=128:per_head=True (default: t5,alibi,shaw)",
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--forward", action="store_true", help="without the backward pass")
    parser.add_argument("--no-naive", action="store_true", help="leave out what holds T x S")
    parser.add_argument("--peers", action="store_true", help="add torch, if it is installed")
    parser.add_argument("--rounds", type=int, default=15, help="rounds (default: 15)")
    parser.add_argument(
        "--seconds", type=float, default=10.0, help="go on that long per shape (default: 10)"
    )


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


def run(options: argparse.Namespace) -> dict:
    """Measures every shape; returns the numbers."""
    shapes = [(options.batch, n, options.heads, options.head_dim) for n in options.lengths]
    results = []
    for shape in TINY if options.tiny else shapes:
        cases, facts = {}, {}
        for name, (f, arguments) in candidates(shape, options).items():
            cases[name], facts[name] = compiled(f, arguments, backward=not options.forward)
        if options.peers and importlib.util.find_spec("torch"):
            cases |= torch_cases(shape, DTYPES[options.dtype], backward=not options.forward)
        what = "forward" if options.forward else "forward+backward"
        timings = side_by_side(cases, rounds=options.rounds, seconds=options.seconds)
        show(f"attention {shape} {options.dtype} {what}", timings)
        print(f"\n  {'':34s} {'memory MB':>10s} {'compile s':>10s}")
        for name, fact in facts.items():
            print(f"  {name:34s} {fact['megabytes']:10.1f} {fact['compile_seconds']:10.2f}")
        rows = [dataclasses.asdict(t) | facts.get(t.name, {}) for t in timings]
        results.append({"shape": shape, "dtype": options.dtype, "what": what, "rows": rows})
    return {"results": results}


def candidates(
    shape: tuple[int, int, int, int], options: argparse.Namespace
) -> dict[str, tuple[Callable, tuple]]:
    """Returns functions of q, k, v and parameters, with what to call them with, by name."""
    _, length, heads, dim = shape
    keys = jax.random.split(jax.random.key(0), 4)
    qkv = tuple(jax.random.normal(key, shape, DTYPES[options.dtype]) for key in keys[:3])
    sizes = {"num_heads": heads, "head_dim": dim, "model_dim": heads * dim, "max_length": length}
    out = {}
    for name in ("none", *(n for n in options.schemes.split(",") if n != "none")):
        scheme = _scheme(name, sizes)
        out[name] = (_with(scheme), (*qkv, scheme.init(keys[3])))
    if not options.no_naive:
        table = pe.T5(num_heads=heads).init(keys[3])["table"]
        out["jax.nn without bias"] = (_jax_nn, (*qkv, None))
        out["jax.nn with T5 matrix"] = (_jax_nn, (*qkv, table))
    return out


def _scheme(text: str, sizes: dict[str, int]) -> pe.Scheme:
    """Returns the scheme that `name:option=value:...` stands for."""
    name, *options = text.split(":")
    cls = pe.SCHEMES[name]
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    given = {key: ast.literal_eval(value) for key, value in (o.split("=") for o in options)}
    return cls(**{n: sizes[n] for n in needed} | OPTIONS.get(name, {}) | given)


def _with(scheme: pe.Scheme) -> Callable:
    def attend(q, k, v, params):
        out, _ = pe.scheme_attention(scheme, params, q, k, v, is_causal=True, implementation="xla")
        return out

    return attend


def _jax_nn(q, k, v, table):
    bias = None
    if table is not None:
        at = jnp.arange(q.shape[1], dtype=jnp.int32)
        bucket = pe.t5_bucket(at[:, None] - at[None])
        bias = jnp.moveaxis(table.T[bucket], -1, 0)[None].astype(q.dtype)
    return jax.nn.dot_product_attention(q, k, v, bias=bias, is_causal=True)


def compiled(f: Callable, arguments: tuple, *, backward: bool) -> tuple[Callable, dict]:
    """Returns a compiled call of f, or of f and its gradients, and what is known of it."""

    def both(*arguments):
        out, pull = jax.vjp(f, *arguments)
        return out, pull(out)

    began = time.perf_counter()
    call = jax.jit(both if backward else f).lower(*arguments).compile()
    seconds = time.perf_counter() - began
    memory: Any = call.memory_analysis()
    held = memory.temp_size_in_bytes
    return lambda: call(*arguments), {"megabytes": held / 1e6, "compile_seconds": seconds}


def torch_cases(shape: tuple, dtype: Any, *, backward: bool) -> dict[str, Callable]:
    """Returns torch's fused attention: without bias, and with a T5 matrix from a learned table."""
    import torch

    batch, length, heads, dim = shape
    kind = torch.float32 if dtype == jnp.float32 else torch.bfloat16
    qkv = [torch.randn(batch, heads, length, dim, dtype=kind) for _ in range(3)]
    table = torch.randn(heads, 32)
    at = jnp.arange(length, dtype=jnp.int32)
    bucket = torch.tensor(jax.device_get(pe.t5_bucket(at[:, None] - at[None]))).long()
    later = torch.ones(length, length, dtype=torch.bool).triu(1)
    learned = [*qkv, table]
    for x in learned:
        x.requires_grad_(backward)

    def attend(biased):
        mask = None
        if biased:
            mask = table[:, bucket].masked_fill(later, -torch.inf)[None].to(kind)
        with torch.set_grad_enabled(backward):
            out = torch.nn.functional.scaled_dot_product_attention(
                *qkv, attn_mask=mask, is_causal=not biased
            )
        if not backward:
            return out.numpy(force=True) if kind == torch.float32 else None
        torch.autograd.grad(out, learned if biased else qkv, torch.ones_like(out))
        return None

    return {
        "torch SDPA without bias": lambda: attend(False),
        "torch SDPA with T5 matrix": lambda: attend(True),
    }
