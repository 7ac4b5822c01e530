"""Digests of the kernels for GPUs that the steps of a check run, to compare two commits.

    python -m tests.makers kernel_programs before.json
    python -m tests.makers kernel_programs after.json before.json

The row of a chip is of the programs that ran there. Files that make them may change and programs
not: the second call names the steps whose kernels are other ones, and fails if there are any.
"""

import hashlib
import json
import pathlib
import re

import jax

from posenc_jax.kernels.checks import cases, steps
from posenc_jax.kernels.gpu.implementation import PallasGPU

KERNELS = ("core_map", "mpmd_map", "pallas_call", "run_state")
PLACES = re.compile(r"0x[0-9a-f]+|(at )?/[\w./-]*(:\d+)*")  # Addresses, and lines of files.


def is_jaxpr(x):
    return hasattr(getattr(x, "jaxpr", x), "eqns")


def inner(eqn):
    """Yields the jaxprs in the parameters of an equation."""
    for x in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
        if is_jaxpr(x):
            yield getattr(x, "jaxpr", x)


def kernels(jaxpr):
    """Yields the equations of a jaxpr that are kernels."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in KERNELS:
            yield eqn
        else:
            for x in inner(eqn):
                yield from kernels(x)


def numbered(variables, names):
    """Returns variables by number, literals as they are."""
    return [str(x if hasattr(x, "val") else names.setdefault(x, len(names))) for x in variables]


def described(eqns, names):
    """Returns equations with variables by number: their printed names depend on JAX's caches."""

    def parameter(x):
        if not is_jaxpr(x):
            return str(x)
        x, inside = getattr(x, "jaxpr", x), dict(names)
        inputs = numbered([*x.constvars, *x.invars], inside)
        return [inputs, described(x.eqns, inside), numbered(x.outvars, inside)]

    lines = []
    for eqn in eqns:
        params = jax.tree.map(parameter, eqn.params, is_leaf=lambda x: x is None or is_jaxpr(x))
        types = [str(x.aval) for x in eqn.outvars]
        lines.append((eqn.primitive.name, numbered(eqn.invars, names), params, types))
        numbered(eqn.outvars, names)
    return lines


def digests(step):
    """Returns the digests of the kernels of a step; a refusal has none."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), cases.inputs(step.case))
    program = cases.program(step.case, PallasGPU(cross_compile=True), **step.options)
    try:
        traced = program.trace(shapes)
    except NotImplementedError:
        return []
    texts = (PLACES.sub("", str(described([eqn], {}))) for eqn in kernels(traced.jaxpr.jaxpr))
    return [hashlib.sha256(text.encode()).hexdigest()[:12] for text in texts]


def main(argv):
    file, *others = map(pathlib.Path, argv)
    programs = {s.name: digests(s) for s in steps.steps() if s.implementation == "pallas"}
    file.write_text(json.dumps(programs, indent=1) + "\n")
    count = sum(map(len, programs.values()))
    print(f"{count} kernels of {len(programs)} steps, jax {jax.__version__}")
    changed = set()
    for other in others:
        before = json.loads(other.read_text())
        names = programs.keys() | before
        changed |= {name for name in names if programs.get(name) != before.get(name)}
        print(f"Other kernels: {', '.join(sorted(changed)) or 'none'}.")
    return int(bool(changed))
