"""Prints versions, devices and the implementations of attention that run here, for bug reports."""

import importlib.metadata
import platform

import jax
import jax.numpy as jnp

import posenc_jax as pe
from posenc_jax.engine import chips
from posenc_jax.engine.api import IMPLEMENTATIONS

PACKAGES = ("jax", "jaxlib", "flax", "numpy", "ml_dtypes")


def version(package: str) -> str:
    """Returns the version of an installed package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def runs(implementation: str) -> str:
    """Returns "runs", or why causal attention in bfloat16 is not computed here."""
    q = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.bfloat16)
    try:
        jax.eval_shape(
            lambda q: pe.attention(q, q, q, is_causal=True, implementation=implementation), q
        )
    except (ImportError, NotImplementedError) as error:
        return str(error).removeprefix(f'attention: implementation="{implementation}": ')
    return "runs"


def main() -> None:
    """Prints one fact per line."""
    lines = {"posenc_jax": pe.__version__, "python": platform.python_version()}
    lines |= {package: version(package) for package in PACKAGES}
    lines |= {"system": f"{platform.system()} {platform.machine()}"}
    kinds = [device.device_kind for device in jax.devices()]
    lines["devices"] = ", ".join(f"{kinds.count(kind)} x {kind}" for kind in dict.fromkeys(kinds))
    lines["backend"] = jax.devices()[0].client.platform_version.replace("\n", " ")
    lines |= {f'implementation="{name}"': runs(name) for name in IMPLEMENTATIONS}
    if lines['implementation="pallas"'] == "runs":
        dates = [chip.date for chip in chips.CHIPS if chip[:3] == chips.here()]
        checked = f"on {dates[-1]}" if dates else "never; python -m posenc_jax.kernels checks them"
        lines["kernels checked here"] = checked
    for name, value in lines.items():
        print(f"{name:28}{value}")


if __name__ == "__main__":
    main()
