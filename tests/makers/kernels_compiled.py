"""Compiles the programs of `posenc_jax.kernels.checks.steps` for a chip that is only described.

    python -m tests.makers kernels_compiled v5e       also v6e, v5p, 7x: with jax[tpu]
    python -m tests.makers kernels_compiled h100      with jax[cuda13], and ptxas on PATH
    ... kernels_compiled v5e "table by distance"      with a name

A program that does not compile here would cost time on the chip. It exits with 1 if a program does
not compile; refused problems are listed.
"""

import os
import time

os.environ["JAX_PLATFORMS"] = "cpu"  # Before jax is imported.
from posenc_jax.kernels.checks import cases
from posenc_jax.kernels.checks.steps import Blocks, steps


def main(argv):
    chip, *names = argv
    small, large = {"cross_compile": True}, {"cross_compile": True}
    if chip == "h100":
        from posenc_jax.kernels.gpu.implementation import PallasGPU as Kernels
        from tests.kernels import tma
        from tests.makers import kernels_gpu_static

        place = kernels_gpu_static.described()
        context = tma.audited()  # A descriptor that the driver would refuse is an error.
    else:
        from jax.sharding import AbstractMesh, SingleDeviceSharding, use_abstract_mesh

        from posenc_jax.kernels.tpu.implementation import PallasTPU as Kernels
        from tests.makers import kernels_tpu_static as static

        place = SingleDeviceSharding(static.device(chip))
        abstract = AbstractMesh((1,), ("x",), abstract_device=static.abstract_device(chip))
        context, blocks = use_abstract_mesh(abstract), Blocks(128, 128)
        small |= {"forward": blocks, "backward": blocks, "decode": 128}
    import jax

    failed = 0
    with context:
        for step in steps():
            if names and not any(part in step.name for part in names):
                continue
            kernels = Kernels(**(large if step.case.default_tiles else small))
            began, outcome = time.monotonic(), "compiled"
            x = jax.tree.map(
                lambda y: jax.ShapeDtypeStruct(y.shape, y.dtype, sharding=place),
                cases.inputs(step.case),
            )
            try:
                function = cases.program(step.case, kernels, **step.options)
                jax.jit(function, out_shardings=place).lower(x).compile()
            except NotImplementedError as error:
                outcome = str(error)
            except Exception as error:
                outcome, failed = f"{type(error).__name__}: {str(error)[-1500:]}", 1
            print(f"{time.monotonic() - began:5.1f} s  {step.name}: {outcome}", flush=True)
    return failed
