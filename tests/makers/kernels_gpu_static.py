"""Spills and memory of the GPU kernels by the compiler, on a machine without a GPU.

XLA compiles for an H100 that is only described, down to machine code: NVIDIA's assembler, ptxas,
says how many registers each kernel takes and how many bytes it spills to memory, the kernel how
much shared memory it has, XLA how much temporary memory the program needs. This program compiles
forward and backward for some rules, prints that, and compares it with gpu_static.json. It exits
with 1 if a kernel spills 64 bytes more or needs more memory, or if ptxas lets the tensor cores wait
for each product ("wgmma serialized"), or if the driver would refuse the descriptor of a copy, and
with 2 if there was nothing to compare with.

    pip install "jax-cuda13-plugin==0.12.*" "jax-cuda13-pjrt==0.12.*"     of the version of jax
    JAX_PLATFORMS=cpu python -m tests.makers kernels_gpu_static           compile and compare
    ... kernels_gpu_static --write           and write the numbers down, for this version of jax
    ... kernels_gpu_static --cases "none;t5"

It says nothing about time. ptxas 12.9.1 or later must be on PATH (it comes with CUDA).
"""

import argparse
import atexit
import dataclasses
import json
import multiprocessing
import os
import pathlib
import re
import shutil
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor

DUMP = pathlib.Path(tempfile.mkdtemp(prefix="gpu-static-"))
atexit.register(shutil.rmtree, DUMP, ignore_errors=True)
os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "MOSAIC_GPU_DUMP_TO": str(DUMP),
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "MOSAIC_GPU_DUMP_RESOURCES": "1",
}

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

import posenc_jax as pe
from posenc_jax.engine.rules import DenseBias, SeparableBias
from posenc_jax.kernels.gpu.implementation import PallasGPU
from tests.kernels import tma

COMMITTED = pathlib.Path(__file__).parents[1] / "kernels" / "gpu_static.json"
SPILLED = 64
"""Bytes that a kernel may spill beyond what it did; another version of ptxas moves some."""
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: 233472 threads_per_core_limit: 2048 core_count: 132 fpus_per_core: 128
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800 clock_rate_ghz: 1.98
  device_memory_size: 84942979072 shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 } registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA" dnn_version_info { major: 9 minor: 8 } runtime_version { major: 13 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """One problem: T = S, causal, forward and backward.

    Attributes:
      rule: "none", "separable", the name of a scheme, for which tokens have 128 numbers, or
        "pairs": a `DenseBias` [1, N, T, T], not causal.
      batch, length, heads, kv_heads, dim, dtype: B, T, N, K, H and the dtype of q, k and v.
      segments, positions: whether these are given, as data.
      options: more arguments of `attention`.
      pairs: dtype of the array of all pairs.
      shared: whether all heads have the same array.
    """

    rule: str = "none"
    batch: int = 4
    length: int = 4096
    heads: int = 16
    kv_heads: int = 16
    dim: int = 128
    dtype: str = "bfloat16"
    segments: bool = False
    positions: bool = False
    options: tuple = ()
    pairs: str = "bfloat16"
    shared: bool = False


CASES = {
    "none": Case(),
    "t5": Case("t5"),
    "alibi": Case("alibi"),
    "kerple": Case("kerple"),
    "fox": Case("separable"),
    "none, segments": Case(segments=True),
    "t5, segments": Case("t5", segments=True),
    "alibi, positions": Case("alibi", positions=True),
    "none, softcap": Case(options=(("softcap", 30.0),)),
    "t5, window": Case("t5", options=(("window", 1024),)),
    "t5, groups of 4": Case("t5", kv_heads=4),
    "t5, float16": Case("t5", dtype="float16"),
    "t5, H 64": Case("t5", dim=64),
    "t5, H 96": Case("t5", dim=96),
    "t5, H 256": Case("t5", dim=256),
    "inkling": Case("inkling"),
    "shaw": Case("shaw"),
    "transformer_xl": Case("transformer_xl"),
    "deberta, H 64": Case("deberta", dim=64),
    "pairs": Case("pairs"),
    "pairs, float32": Case("pairs", pairs="float32"),
    "pairs, heads share": Case("pairs", shared=True),
    "pairs, causal": Case("pairs", options=(("is_causal", True),)),
    "pairs, H 256, float32": Case("pairs", dim=256, pairs="float32"),
    "pairs, B 128, N 4, H 32": Case("pairs", 128, 2048, 4, 4, 32),
    "pairs, B 128, N 4, H 32, float32": Case("pairs", 128, 2048, 4, 4, 32, pairs="float32"),
    "pairs, B 1, N 16, H 48": Case("pairs", 1, 2048, 16, 16, 48),
    "pairs, B 1, N 16, H 24": Case("pairs", 1, 2048, 16, 16, 24),
}
WIDTH = 128
ARRAYS = ("none", "separable", "pairs")
"""Rules that are no schemes."""
ADVICE = {
    "wgmma serialized": r"wgmma\.mma_async instructions are serialized",
    "waits injected": r"warpgroup\.wait is injected",
    "registers not moved": r"setmaxnreg.*ignored",
}
"""What ptxas says about products that do not overlap, of which there must be none."""


def program(case: Case, sharding):
    """Returns a function, and the types of its arguments."""
    scheme = None
    batch, length, heads = case.batch, case.length, case.heads
    if case.rule not in ARRAYS:
        sizes = {"num_heads": heads, "head_dim": case.dim, "model_dim": WIDTH}
        sizes |= {"values": False, "projected": True}
        known = {field.name for field in dataclasses.fields(pe.SCHEMES[case.rule])}
        scheme = pe.SCHEMES[case.rule](**{n: x for n, x in sizes.items() if n in known})

    def attend(q, k, v, x, params, row, column, pairs, positions, segments):
        rules = ()
        if scheme is not None:
            q_positions = jnp.arange(length)[None] if positions is None else positions[None]
            features = scheme.features(params, x, q, k, q_positions, None, None)[:2]
            rules = scheme.rules(params, *features)
        if case.rule == "separable":
            rules = SeparableBias(q_features=row, k_features=column)
        if case.rule == "pairs":
            rules = DenseBias(pairs)
        return pe.attention(
            q,
            k,
            v,
            rules=rules,
            q_positions=positions,
            k_positions=positions,
            q_segment_ids=segments,
            contiguous=True if case.segments else None,
            implementation=PallasGPU(cross_compile=True),
            **{"is_causal": case.rule != "pairs"} | dict(case.options),
        )

    def both(diff, data, d_out):
        out, pull = jax.vjp(lambda diff: attend(*diff, *data), diff)
        return out, pull(d_out)

    def spec(shape, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

    dtype = jnp.dtype(case.dtype)
    tokens = batch, length
    q, k = (spec((*tokens, n, case.dim), dtype) for n in (heads, case.kv_heads))
    params = {}
    if scheme is not None:
        shapes = jax.eval_shape(scheme.init, jax.random.key(0))
        params = jax.tree.map(lambda x: spec(x.shape, x.dtype), shapes)
    gates = [spec((*tokens, heads)) if case.rule == "separable" else None] * 2
    shape = 1, 1 if case.shared else heads, length, length
    pairs = spec(shape, case.pairs) if case.rule == "pairs" else None
    positions = spec((length,), jnp.int32) if case.positions else None
    segments = spec(tokens, jnp.int32) if case.segments else None
    x = spec((*tokens, WIDTH), dtype)
    return both, ((q, k, k, x, params, *gates, pairs), (positions, segments), q)


def described():
    """Returns the sharding of a GPU that is described."""
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name="", topology="1x1x1", target_config=H100
    )
    return SingleDeviceSharding(topology.devices[0])


def measured(case: Case) -> dict[str, int]:
    """Returns registers, spilled bytes and shared memory per kernel, temporary bytes, and `ADVICE`.

    It needs a process of its own: a kernel that is equal to an earlier one is not compiled again.
    """
    function, arguments = program(case, described())
    with tma.audited():
        compiled = jax.jit(function).lower(*arguments).compile()
    results = {"temporary bytes": compiled.memory_analysis().temp_size_in_bytes}
    for metric, pattern, files in (
        ("registers", r"Used (\d+) registers", "*.ptxas"),
        ("spilled bytes", r"(\d+) bytes spill stores", "*.ptxas"),
        ("shared memory", r"smem_scratch_bytes=(\d+)", "*.resources.txt"),
    ):
        for path in sorted(DUMP.glob(files)):
            kernel = re.match(r"attention_(\w+)_\d+\.", path.name)
            numbers = re.findall(pattern, path.read_text(errors="replace"))
            if kernel is not None and numbers:
                results[f"{kernel[1]}: {metric}"] = int(numbers[0])
    if not any("registers" in metric for metric in results):
        raise RuntimeError(f"the compiler wrote nothing of the kernels to {DUMP}")
    said = "\n".join(path.read_text(errors="replace") for path in DUMP.glob("*.ptxas"))
    return results | {name: len(re.findall(text, said)) for name, text in ADVICE.items()}


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", help="names, with semicolons between them; default: all")
    parser.add_argument("--write", action="store_true", help="write the numbers down")
    arguments = parser.parse_args(argv)
    names = arguments.cases.split(";") if arguments.cases else list(CASES)
    unknown = sorted(set(names) - set(CASES))
    if unknown:
        parser.error(f"no such cases: {', '.join(unknown)}; there are: {'; '.join(CASES)}")
    if shutil.which("ptxas") is None:
        print("ptxas is not on PATH: install CUDA, or the wheel nvidia-cuda-nvcc", file=sys.stderr)
        return 2
    try:
        described()
    except Exception as error:
        print(f"jax cannot compile for a GPU that is described: {error}", file=sys.stderr)
        return 2
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    known = committed.setdefault(jax.__version__, {})
    if not known and not arguments.write:
        print(f"{COMMITTED.name} has nothing for jax {jax.__version__}; --write", file=sys.stderr)
    worse: list[str] = []
    apart = multiprocessing.get_context("spawn")
    for name in names:
        start = time.perf_counter()
        with ProcessPoolExecutor(1, mp_context=apart) as pool:
            results = pool.submit(measured, CASES[name]).result()
        seconds = time.perf_counter() - start
        print(f"{name} ({seconds:.0f} s)", flush=True)
        for metric, number in results.items():
            old = known.get(name, {}).get(metric)
            slack = SPILLED if "spilled" in metric else 0.05 * (old or 0)
            bad = old is not None and number > old + slack
            bad |= metric in ADVICE and number > 0
            worse += [f"{name}, {metric}: {old} before, {number} now"] if bad else []
            print(
                f"  {metric:<36}{number:>12,}"
                + (f"   {old:,} before" if old not in (None, number) else "")
            )
        if arguments.write:
            known[name] = results
    if arguments.write:
        COMMITTED.write_text(json.dumps(committed, indent=1) + "\n")
    for line in worse:
        print("worse:", line, file=sys.stderr)
    return 1 if worse else 0 if known else 2
