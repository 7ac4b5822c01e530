"""The chips on which the kernels of this package were right, for `implementation=None`."""

import dataclasses
import warnings
from typing import NamedTuple

import jax
import jaxlib

from posenc_jax.engine.pallas import Pallas
from posenc_jax.engine.problem import Problem


class Chip(NamedTuple):
    """A kind of chip on which every step of `python -m posenc_jax.kernels` passed.

    Attributes:
      device_kind: as `jax.Device.device_kind` has it.
      jax: the version of jax and jaxlib.
      runtime: `platform_version` of JAX's client: the version of CUDA or libtpu.
      dtypes: of q, k and v in the steps that ran.
      date: of the run.
      commit: of the kernels that ran.
    """

    device_kind: str
    jax: str
    runtime: str
    dtypes: tuple[str, ...]
    date: str
    commit: str


CHIPS: tuple[Chip, ...] = (
    Chip(
        device_kind="NVIDIA H100 80GB HBM3",
        jax="0.11.2",
        runtime="cuda 13000",
        dtypes=("bfloat16",),
        date="2026-11-27",
        commit="920f9bd6",
    ),
)
"""One row per run. Only the versions of a row count, not newer ones: each lowers the kernels anew.

A change of the programs of a platform's kernels removes its rows until the steps have run again.
"""


def here(platform: str | None = None) -> tuple[str, str, str]:
    """Returns kind, version of jax and runtime of the device, as rows of `CHIPS` begin."""
    device = jax.local_devices(backend=platform)[0]
    described = jax.sharding.get_abstract_mesh().abstract_device
    runtime = " ".join(device.client.platform_version.split())
    return (described or device).device_kind, jax.__version__, runtime


def are_default(problem: Problem) -> bool:
    """Returns whether `None` may take "pallas" for a problem on the device that is there."""
    # No step has values of another head dim, or another jaxlib than jax; none had branches,
    # windows by coordinates or block masks when the steps of these rows ran.
    same = problem.q.shape[3] == problem.v.shape[3] and jax.__version__ == jaxlib.__version__
    same &= problem.k_visible_until is None and not problem.window_by_coordinates
    same &= problem.block_mask is None
    dtype, device = problem.q.dtype.name, here(problem.platform)
    return same and any(chip[:3] == device and dtype in chip.dtypes for chip in CHIPS)


_warned: set[tuple[str, str, str]] = set()


def warn_of_tiles(problem: Problem, kernels: Pallas) -> None:
    """Warns, once for a chip and its versions, that `None` takes tiles where there are kernels.

    Args:
      problem: a problem for which "xla" was chosen.
      kernels: of this package.
    """
    kind, version, runtime = device = here(problem.platform)
    of_any_version = dataclasses.replace(kernels, any_version=True)
    if device in _warned or of_any_version.refusal(problem) is not None:
        return
    _warned.add(device)
    word = (
        '"pallas"' if kernels.refusal(problem) is None else "engine.pallas.Pallas(any_version=True)"
    )
    checked = "; ".join(
        f"{chip.device_kind} with jax {chip.jax}, {chip.runtime} ({', '.join(chip.dtypes)})"
        for chip in CHIPS
    )
    times = (
        'On an H100 "xla" takes 6 to 13 times as long as they do.'
        if problem.platform == "gpu"
        else "They have not been timed on TPUs: time both."
    )
    warnings.warn(
        f'attention: implementation=None takes "xla" for calls like this one, in {problem.q.dtype} '
        f"on {kind} with jax {version}, {runtime}: the kernels of this package were checked on "
        f"{checked or 'no chip'}. {times} Run "
        "`python -m posenc_jax.kernels`, which checks them in minutes, and if all steps are right "
        f'give implementation=({word}, None). implementation="xla" keeps tiles without a warning.',
        stacklevel=2,
    )
