"""`implementation="pallas"` on NVIDIA GPUs."""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.kernels import Kernels, compute, padded, refusal, without_hidden
from posenc_jax.engine.problem import Problem

_CAPABILITY = "9.0"  # Only these GPUs have the products that the kernels use.


@dataclasses.dataclass(frozen=True)
class PallasGPU(Kernels):
    """Flash attention kernels for GPUs of compute capability 9.0 (H100, H200).

    Attributes:
      interpret, cross_compile, batch_axes, head_axes: see `Kernels`; parameters of the
        interpreter are `jax.experimental.pallas.mosaic_gpu.InterpretGPUParams`.
    """

    platform = "gpu"

    def supports(self, problem: Problem) -> str | None:
        if jax.__version_info__ < (0, 11, 2):
            return f"kernels for GPUs need jax 0.11.2 or later, and this is {jax.__version__}"
        if jax.default_backend() == "gpu" and not (self.interpret or self.cross_compile):
            found = jax.local_devices()[0].compute_capability
            if found != _CAPABILITY:
                return (
                    f"kernels for GPUs need compute capability {_CAPABILITY}, and this is {found}"
                )
        return super().supports(problem)

    def refuses(self, problem: Problem) -> str | None:
        p = problem
        dtypes = [jnp.bfloat16, jnp.float16] + [jnp.float32] * bool(self.interpret)
        if p.q.dtype not in dtypes or not p.q.dtype == p.k.dtype == p.v.dtype:
            return "on GPUs, q, k and v must all be bfloat16 or all float16"
        if max(p.q.shape[3], p.v.shape[3]) > 256:
            return 'head dims beyond 256 need implementation="xla"'
        if p.dropout_seeds is not None:
            return 'dropout needs implementation="xla" on GPUs'
        return refusal(p, products=False)

    def on_device(self, problem: Problem) -> tuple[jax.Array, jax.Array]:
        from posenc_jax.engine.gpu.backward import backward
        from posenc_jax.engine.gpu.forward import forward
        from posenc_jax.engine.gpu.spec import Spec

        p = without_hidden(problem)
        dim, value_dim = p.q.shape[3], p.v.shape[3]
        wide = max(dim, value_dim) > 128
        q, k, v = (_padded_dim(x) for x in (p.q, p.k, p.v))
        p = dataclasses.replace(p, q=q, k=k, v=v)
        spec_of = functools.partial(
            Spec,
            length=padded(p.length, 128),
            keys=padded(p.keys, 128),
            forward=Blocks(128, 32 if wide else 128),
            backward=Blocks(128, 32 if wide else 64),
            interpret=self.interpret,
        )
        out, lse = compute((forward, backward), spec_of, p)
        return out[..., :value_dim], lse


def _padded_dim(x: jax.Array) -> jax.Array:
    """Returns vectors with zeros up to a multiple of 32 numbers, rows of shared memory."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[3] % 32)))
