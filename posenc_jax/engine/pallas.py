"""`implementation="pallas"`: the kernels of the platform."""

import dataclasses
from typing import Any

import jax

from posenc_jax.engine.mesh import mesh_of, mesh_refusal
from posenc_jax.engine.problem import Implementation, Problem


@dataclasses.dataclass(frozen=True)
class Pallas(Implementation):
    """`PallasGPU()` on GPUs, `PallasTPU()` elsewhere.

    Attributes:
      any_version: as in `PallasGPU`.
    """

    name = "pallas"
    any_version: bool = False

    def _kernels(self, platform: str) -> Any:
        # Imported here: Pallas takes half of the time that this package adds to `import jax`.
        if platform == "gpu":
            from posenc_jax.kernels.gpu.implementation import PallasGPU

            return PallasGPU(any_version=self.any_version)
        from posenc_jax.kernels.tpu.implementation import PallasTPU

        return PallasTPU()

    def platform_refusal(self, platform: str) -> str | None:
        """Returns why the chip of a platform has no kernels, whatever the problem, or None."""
        if platform not in ("tpu", "gpu"):
            return f"there are kernels for TPUs and NVIDIA GPUs, and the platform is {platform}"
        return self._kernels(platform).platform_refusal()

    def refusal(self, problem: Problem) -> str | None:
        if (reason := self.platform_refusal(problem.platform)) is not None:
            return reason
        kernels, mesh = self._kernels(problem.platform), mesh_of(problem)
        return kernels.refusal(problem) or mesh_refusal(problem, mesh, *kernels.axes(problem))

    def on_mesh(self, problem: Problem, mesh: Any, spec: Any) -> tuple[jax.Array, Any]:
        return self._kernels(problem.platform).on_mesh(problem, mesh, spec)

    def __call__(self, problem: Problem) -> tuple[jax.Array, Any]:
        return self._kernels(problem.platform)(problem)
