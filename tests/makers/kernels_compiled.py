"""Compiles the steps of the kernels for a chip that is only described.

    python -m tests.makers kernels_compiled v5e        also v6e, v5p, 7x: with jax[tpu]
    python -m tests.makers kernels_compiled h100       with jax[cuda13]
    ... kernels_compiled h100 table "head dim"         steps with one of these in their names
    ... kernels_compiled h100 --write                  writes spilled.json, for this version of jax

A program that does not compile here would cost time on the chip. For an H100, the descriptors of
copies have to hold the rules of the driver (`tests.kernels.tma`), and ptxas reports each kernel:
registers and bytes that it spills to memory. A kernel that is equal to an earlier one is not
compiled again. It says nothing about time. Refused problems are listed; it exits with 1 if a
program does not compile, if a kernel spills 64 bytes more than in spilled.json, or if ptxas lets
the tensor cores wait for each product.
"""

import atexit
import json
import os
import pathlib
import re
import shutil
import tempfile
import time

DUMP = pathlib.Path(tempfile.mkdtemp(prefix="kernels-compiled-"))
atexit.register(shutil.rmtree, DUMP, ignore_errors=True)
os.environ |= {  # Before jax is imported.
    "JAX_PLATFORMS": "cpu",
    "MOSAIC_GPU_DUMP_TO": str(DUMP),
    "MOSAIC_GPU_DUMP_PTXAS": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-1",
}

import jax
from jax.experimental import topologies
from jax.sharding import AbstractMesh, SingleDeviceSharding

from posenc_jax.engine.blocks import Blocks
from posenc_jax.kernels.checks import cases, steps
from posenc_jax.kernels.gpu.implementation import PallasGPU
from posenc_jax.kernels.tpu.implementation import PallasTPU
from tests.kernels import tma
from tests.kernels.kernel_cases import abstract_device

COMMITTED = pathlib.Path(__file__).parents[1] / "kernels" / "spilled.json"
MORE = 64
"""Bytes that a kernel may spill beyond what it did."""
TPUS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "v5p": "v5p:2x2x1", "7x": "tpu7x:2x2x1"}
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
ADVICE = r"wgmma\.mma_async instructions are serialized|warpgroup\.wait is injected|setmaxnreg.*ign"
"""What ptxas says about products that do not overlap."""


def described(chip):
    """Returns a device of a chip, the settings of its kernels, and a context for their programs."""
    if chip == "h100":
        options = {"platform": "cuda", "topology_name": "", "topology": "1x1x1"}
        topology = topologies.get_topology_desc(**options, target_config=H100)
        return topology.devices[0], lambda case: PallasGPU(cross_compile=True), tma.audited()
    device = topologies.get_topology_desc(platform="tpu", topology_name=TPUS[chip]).devices[0]
    blocks = Blocks(128, 128)

    def kernels(case):
        sizes = {} if case.default_tiles else {"forward": blocks, "backward": blocks}
        return PallasTPU(**sizes, cross_compile=True)

    mesh = AbstractMesh((1,), ("x",), abstract_device=abstract_device(device.device_kind))
    return device, kernels, jax.sharding.use_abstract_mesh(mesh)


def compile_step(step, kernels, device):
    """Compiles a step; returns registers and spilled bytes of the kernels for GPUs, and advice."""
    for path in DUMP.iterdir():
        path.unlink()
    place, shapes = SingleDeviceSharding(device), cases.inputs(step.case)
    x = jax.tree.map(lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=place), shapes)
    function = cases.program(step.case, kernels(step.case), **step.options)
    jax.jit(function, out_shardings=place).lower(x).compile()
    usage, advice = {}, []
    for path in sorted(DUMP.glob("*.ptxas")):
        text = path.read_text(errors="replace")
        advice += re.findall(ADVICE, text)
        patterns = (r"Used (\d+) registers", r"(\d+) bytes spill stores")
        numbers = [int(re.search(pattern, text)[1]) for pattern in patterns]
        usage[re.match(r"attention_(\w+)_\d+\.", path.name)[1]] = numbers
    return usage, advice


def main(argv):
    chip, *names = argv
    write, names = "--write" in names, [name for name in names if name != "--write"]
    device, kernels, context = described(chip)
    committed = json.loads(COMMITTED.read_text()) if COMMITTED.exists() else {}
    known, spilled, failed = committed.get(jax.__version__), {}, 0
    with context:
        for step in steps.steps():
            if names and not any(part in step.name for part in names):
                continue
            began = time.monotonic()
            try:
                usage, advice = compile_step(step, kernels, device)
                failed |= bool(advice)
                parts = (f"{name} {x}" for name, x in usage.items())
                outcome = ", ".join([*parts, *advice]) or "compiled"
                for name, (_, stored) in usage.items():
                    key = f"{step.name}: {name}"
                    spilled |= {key: stored} if stored else {}
                    if known is not None and stored > known.get(key, 0) + MORE:
                        outcome, failed = f"{outcome}; {known.get(key, 0)} before", 1
            except NotImplementedError as error:
                outcome = str(error)
            except Exception as error:
                outcome, failed = f"{type(error).__name__}: {str(error)[-1500:]}", 1
            print(f"{time.monotonic() - began:5.1f} s  {step.name}: {outcome}", flush=True)
    if write:
        text = json.dumps(committed | {jax.__version__: spilled}, indent=1)
        COMMITTED.write_text(text + "\n")
    return failed
