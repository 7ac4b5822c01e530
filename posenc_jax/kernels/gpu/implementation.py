"""`implementation="pallas"` on NVIDIA GPUs."""

import contextlib
import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp

from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.problem import Problem, repeat_heads
from posenc_jax.kernels.base import Kernels, padded, rule_refusal, without_hidden

MOVES_REGISTERS = jax.__version_info__ < (0, 12)
"""Whether `setmaxnreg` is heeded: from jax 0.12 on XLA compiles kernels by nvJitLink, as code that
may be linked with other code, for which it is ignored."""
COMPILED = (0, 11), (0, 12)
"""Versions of jax with which all kernels were compiled for an H100, by ptxas' reports."""
_CAPABILITY = "9.0"  # Only these GPUs have the products that the kernels use.
_MISCOMPILED = range(12080, 12091)  # JAX's attention kernel for these GPUs refuses them, too.


@dataclasses.dataclass(frozen=True)
class PallasGPU(Kernels):
    """Flash attention kernels for GPUs of compute capability 9.0 (H100, H200).

    Attributes:
      any_version: take versions of JAX with which nobody compiled the kernels, which may miscompile
        them: check them first, by `python -m posenc_jax.kernels`.
      interpret, cross_compile, batch_axes, head_axes: see `ShardMapped`; parameters of the
        interpreter are `jax.experimental.pallas.mosaic_gpu.InterpretGPUParams`.
    """

    platform = "gpu"
    any_version: bool = False

    def platform_refusal(self) -> str | None:
        version = jax.__version__
        if jax.__version_info__ < (0, 11, 2):
            return f"kernels for GPUs need jax 0.11.2 or later, and this is {version}"
        if not (self.interpret or self.cross_compile):
            if not self.any_version and jax.__version_info__[:2] not in COMPILED:
                return (
                    f"nobody compiled the kernels with jax {version}; run `python -m "
                    "posenc_jax.kernels`, then give engine.pallas.Pallas(any_version=True)"
                )
            capability = jax.local_devices(backend="gpu")[0].compute_capability
            if capability != _CAPABILITY:
                return (
                    f"kernels for GPUs need compute capability {_CAPABILITY}, and this is "
                    f"{capability}"
                )
            if _cuda_version() in _MISCOMPILED:
                return (
                    "kernels for GPUs need CUDA 13: ptxas of 12.8.0 to 12.9.0 is wrong, and the "
                    "version that JAX reports is the same for 12.9.1"
                )
        return None

    def refusal(self, problem: Problem) -> str | None:
        return super().refusal(problem) or self.platform_refusal()

    def device_refusal(self, problem: Problem) -> str | None:
        p = problem
        # The tensor cores multiply float32 as tf32, of 11 digits; the interpreter has all 24.
        dtypes = [jnp.bfloat16, jnp.float16] + [jnp.float32] * bool(self.interpret)
        if p.q.dtype not in dtypes or not p.q.dtype == p.k.dtype == p.v.dtype:
            return "on GPUs, q, k and v must all be bfloat16 or all float16"
        if max(p.q.shape[3], p.v.shape[3]) > 256:
            return 'head dims beyond 256 need implementation="xla"'
        if p.q.shape[0] > 65_535:  # The third axis of a grid; CUDA ends the process.
            return 'batches beyond 65,535 rows need implementation="xla"'
        if p.dropout_seeds is not None:
            return 'dropout needs implementation="xla" on GPUs'
        return _pairs_refusal(p) or rule_refusal(p, functools.partial(_vector_refusal, p))

    def on_device(self, problem: Problem) -> tuple[jax.Array, Any]:
        from posenc_jax.engine.rules import DotBias

        p = without_hidden(problem)
        value_dim = p.v.shape[3]
        q, k, v = (_padded_dim(x) for x in (p.q, p.k, p.v))
        if any(
            isinstance(rule, DotBias)
            and rule.k_features is not None
            and rule.k_features.shape[2] > p.k.shape[2]
            for rule in p.rules
        ):
            # A block of threads has the features of its keys, of one head.
            k, v = (repeat_heads(x, p.num_heads) for x in (k, v))
        out, lse = self.run(dataclasses.replace(p, q=q, k=k, v=v))
        return out[..., :value_dim], lse

    def make_spec(self, problem: Problem, **fields: Any) -> Any:
        from posenc_jax.kernels.gpu.spec import GPUSpec

        wide = max(fields["dim"], fields["value_dim"]) > 128
        # The tile of an array of all pairs takes as much shared memory as 64 keys or more.
        has_pairs = fields["pairs"] and max(fields["dim"], fields["value_dim"]) > 64
        narrow_keys = 64 if fields["products"] or has_pairs else 128
        return GPUSpec(
            **fields,
            length=padded(problem.length, 128),
            keys=padded(problem.keys, 128),
            # Two warpgroups have 64 queries each. With the sums of wide heads there are registers
            # for the logits of 32 keys.
            forward=Blocks(128, 32 if wide else narrow_keys),
            backward=Blocks(128, 32 if wide else 64),
            moves_registers=MOVES_REGISTERS,
            interpret=self.interpret,
        )

    def run_forward(self, spec, x):
        from posenc_jax.kernels.gpu.forward import forward

        return forward(spec, x)

    def run_backward(self, spec, x, d_out, lse, delta):
        from posenc_jax.kernels.gpu.backward import backward

        return backward(spec, x, d_out, lse, delta)


def _cuda_version() -> int | None:
    """Returns the version of CUDA that JAX has, 12090 for 12.9.0 and 12.9.1, or None."""
    for plugin in ("jax_cuda13_plugin", "jax_cuda12_plugin"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"{plugin}._versions").cuda_runtime_get_version()
    return None


def _vector_refusal(p: Problem, counts: list[int]) -> str | None:
    """Returns why there is no kernel for vectors of `counts` numbers per distance, or None."""
    from posenc_jax.kernels.gpu.bands import fits

    dims = padded(p.q.shape[3], 32), padded(p.v.shape[3], 32)
    if counts and (max(*dims, *counts) > 128 or not fits(*dims, counts)):
        return f"a vector of a token times one per distance, with {counts} numbers,"
    return None


def _pairs_refusal(p: Problem) -> str | None:
    """Returns why there is no kernel for the arrays of all pairs, or None."""
    from posenc_jax.engine.rules import DotBias

    arrays = [rule.pairs for rule in p.rules if rule.pairs is not None]
    if any(x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32) for x in arrays):
        return "an array of all pairs must be bfloat16, float16 or float32"
    if any(x.shape[0] * x.shape[1] > 65_535 for x in arrays):
        return 'an array of all pairs of more than 65,535 rows and heads needs implementation="xla"'
    if len(arrays) > 1:
        return 'on GPUs, several arrays of all pairs need implementation="xla"; add them up'
    if arrays and any(isinstance(rule, DotBias) for rule in p.rules):
        return (
            "on GPUs, an array of all pairs with a vector of a token times one per distance needs "
            'implementation="xla"'
        )
    return None


def _padded_dim(x: jax.Array) -> jax.Array:
    """Pads vectors with zeros to a multiple of 32 numbers, rows of shared memory."""
    return jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, -x.shape[3] % 32)))
