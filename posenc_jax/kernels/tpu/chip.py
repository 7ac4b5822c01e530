"""The TPU that kernels run on or are compiled for."""

import jax

SMEM = 2**20
"""Bytes of memory for scalars."""

_VMEM = {
    "TPU v5 lite": 128,
    "TPU v5e": 128,
    "TPU v5": 64,
    "TPU v5p": 64,
    "TPU v6 lite": 128,
    "TPU v6e": 128,
    "TPU7x": 64,
}
"""MiB of memory for vectors of a core, by the device kinds for which the kernels compile."""


def device_kind() -> str | None:
    """Returns the kind of the TPU that is described or attached, or None."""
    described = jax.sharding.get_abstract_mesh().abstract_device
    if described is not None and described.device_kind.startswith("TPU"):
        return described.device_kind
    return jax.local_devices()[0].device_kind if jax.default_backend() == "tpu" else None


def chip_refusal(*others: str) -> str | None:
    """Returns why kernels do not run on this TPU, or None.

    Mosaic has no strided rotations for TPU v4 and older ones, and stops with an internal error.

    Args:
      *others: further device kinds for which the kernels compile.
    """
    kind = device_kind()
    if kind is None or kind in (*_VMEM, *others):
        return None
    names = ("TPU v5e, v5p, v6e and 7x", *others)
    return f"the kernels are for {', '.join(names)}, and this is {kind}"


def default_vmem_limit() -> int:
    """Returns the bytes of VMEM that a kernel may use; the compiler takes some for itself."""
    return (100 if _VMEM.get(device_kind() or "", 128) == 128 else 60) * 2**20
