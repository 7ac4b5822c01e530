"""Injects faults into the kernels, and prints the steps that find each and the place they name.

    JAX_PLATFORMS=cpu .venv/bin/python -m tests.makers kernels_fault_table [NAME ...]

In Pallas' interpreters, in about five minutes; faults of the GPU's kernels need jax 0.11.2.
"""

import jax

from tests.kernels.faults import FAULTS, outcomes


def main(names) -> None:
    print("| fault | first step that finds it | the place that it names | other steps |")
    print("|---|---|---|---|")
    for fault in FAULTS:
        if names and not any(name in fault.name for name in names):
            continue
        if fault.gpu and jax.__version_info__ < (0, 12):
            continue
        failures = outcomes(fault)
        first = next(iter(failures), "none")
        place = " ".join(failures.get(first, "").split())
        others = "; ".join(list(failures)[1:])
        print(f"| {fault.name} | {first} | {place} | {others} |", flush=True)
