"""Compiles the programs of `posenc_jax.kernels.checks.steps` for a chip that is only described.

    python -m tests.makers kernels_compiled v5e       also v6e, v5p, 7x: with jax[tpu]
    python -m tests.makers kernels_compiled h100      with jax[cuda13], and ptxas on PATH
    ... kernels_compiled v5e primitives "table by distance"      with a name

A program that does not compile here would cost time on the chip. It exits with 1 if a program does
not compile; refused problems are listed.
"""

import os
import time

os.environ["JAX_PLATFORMS"] = "cpu"  # Before jax is imported.
from posenc_jax.kernels.checks import cases, steps


def main(argv):
    chip, *names = argv
    if chip == "h100":
        from posenc_jax.kernels.checks.gpu_primitives import primitives
        from posenc_jax.kernels.gpu.implementation import PallasGPU as Kernels
        from tests.kernels import tma
        from tests.makers import kernels_gpu_static

        place, context = kernels_gpu_static.described(), None
        descriptors = tma.audited()  # One that the driver would refuse is an error.
        descriptors.__enter__()
    else:
        from jax.sharding import AbstractMesh, SingleDeviceSharding, use_abstract_mesh

        from posenc_jax.kernels.checks.tpu_primitives import primitives
        from posenc_jax.kernels.tpu.implementation import PallasTPU as Kernels

        place = SingleDeviceSharding(kernels_gpu_static.device(chip))
        abstract = AbstractMesh(
            (1,), ("x",), abstract_device=kernels_gpu_static.abstract_device(chip)
        )
        context = use_abstract_mesh(abstract)
    import jax

    def compile(name, function, arguments):
        if names and not any(part in name for part in names):
            return 0
        began, failed, outcome = time.monotonic(), 0, "compiled"
        shapes = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), arguments
        )
        try:
            jax.jit(function, out_shardings=place).lower(*shapes).compile()
        except NotImplementedError as error:
            outcome = str(error)
        except Exception as error:
            outcome, failed = f"{type(error).__name__}: {str(error)[-1500:]}", 1
        print(f"{time.monotonic() - began:5.1f} s  {name}: {outcome}", flush=True)
        return failed

    failed = 0
    for x in primitives(False, small=False):
        failed += compile(f"primitives: {x.name}", x.function, x.arguments)
    if context is not None:
        context.__enter__()
    for family, problems, gradients in (
        ("forward", steps.TRAINING, False),
        ("backward", steps.TRAINING, True),
        ("decode", steps.DECODE, False),
        ("tiles", steps.TILES, True),
    ):
        for case in problems:
            settings = {"cross_compile": True}
            if chip != "h100" and family != "tiles":
                blocks = steps.Blocks(128, 128)
                settings |= {"forward": blocks, "backward": blocks, "decode": 128}
            kernels = Kernels(**settings)
            function = cases.program(case, kernels, gradients=gradients, lse=True)
            failed += compile(f"{family}: {case.name}", function, (cases.inputs(case),))
    return int(failed > 0)
