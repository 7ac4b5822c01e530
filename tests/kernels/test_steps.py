"""The steps themselves: in the interpreter all is right, and an injected fault has its place.

`makers/kernels_fault_table.py` runs all steps of the selection with each fault; slow cases compare
the steps that find it here, and run the steps of both platforms.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.kernels.checks import cases, places
from posenc_jax.kernels.checks.cases import Case
from posenc_jax.kernels.checks.steps import FAMILIES, steps
from posenc_jax.kernels.gpu.implementation import PallasGPU
from posenc_jax.kernels.tpu import backward, backward_pairs, decode, forward
from posenc_jax.kernels.tpu.tile import poison
from tests.kernels.faults import (
    BACKWARD,
    DECODE,
    FAULTS,
    FORWARD,
    SOFTCAP,
    injected,
    outcome,
    outcomes,
    selected,
)
from tests.support import gpu_interpreted, slow

EXPECTED_BY_OTHERS = (
    Case("table, segments, softcap", "table", segments=True, softcap=3.0, length=300),
    Case("product of keys, window", "product of keys", dim=64, window=150, length=300),
    Case("pair, dropout, sinks", "pair", heads=4, dropout=0.3, sinks=True, length=300),
    Case("last queries", "separable", length=240, later=60),
    Case("array of all pairs", "array", heads=4, length=300, softcap=3.0),
    Case("slopes, shuffled", "slopes", length=300, shuffled=True, window=(100, 3), causal=False),
)


@pytest.mark.parametrize("case", EXPECTED_BY_OTHERS, ids=lambda case: case.name)
def test_what_is_expected_equals_the_reference(case):
    """NumPy's outcome and JAX's derivatives of "reference" share no code."""
    case = cases.dataclasses.replace(case, dtype="float32")
    x = cases.inputs(case)
    with jax.default_matmul_precision("highest"):
        got = cases.run(case, "reference", x, gradients=True, lse=True)
    assert places.first_wrong(case, got, cases.expected(case, x, gradients=True)) is None


def test_names_are_unique():
    every = [(step.family, step.name) for step in steps()]
    assert len(every) == len({*every}) and [*dict.fromkeys(f for f, _ in every)] == [*FAMILIES]


@pytest.mark.parametrize("rule", [name for name in cases.RULES if name != "none"])
def test_gradients_of_parameters_are_checked_as_a_whole(rule):
    """2 % lie within the bound of single numbers in bfloat16, 0.1 % within all."""
    case = Case("", rule, length=120, dim=64)
    want = cases.expected(case, cases.inputs(case), gradients=True)
    for name in (name for name in want if name.startswith("gradient")):
        assert places.first_wrong(case, want | {name: 1.001 * want[name]}, want) is None
        place = places.first_wrong(case, want | {name: 1.02 * want[name]}, want)
        assert place == f"{name}: 1.0200 times what is expected"


RIGHT = ("primitives: entries of a schedule", "decode: 2 heads of keys")


@pytest.mark.parametrize("name", RIGHT)
def test_steps_are_right_in_the_interpreter(name):
    (step,) = (step for step in steps(interpret=True, small=True) if step.name == name)
    assert step.run() is None


@pytest.mark.parametrize(("word", "name"), [("xla", "no rule"), ("jax", "float32")])
def test_other_implementations_are_right(word, name):
    """The second returns no log-sum-exp; in bfloat16, `jax.nn` sums dv in bfloat16 on CPUs."""
    (step,) = (s for s in steps(word, small=True) if s.name == f"backward: {name}")
    with jax.numpy_dtype_promotion("standard"):  # As `jax.nn` needs.
        assert step.run() is None
    refused = next(s for s in steps("jax", family="forward") if s.name == "forward: pair")
    with pytest.raises(NotImplementedError):
        refused.run()


@slow
@pytest.mark.parametrize("family", FAMILIES)
def test_all_steps_are_right_in_the_interpreter(family):
    chosen = steps(family=family, interpret=True, small=True)
    assert {step.name: place for step in chosen if (place := step.run()) is not None} == {}


@slow
@gpu_interpreted
@pytest.mark.parametrize("name", [FORWARD, SOFTCAP, BACKWARD, DECODE])
def test_steps_of_the_gpu_kernels_are_right_in_the_interpreter(name):
    (step,) = (s for s in steps(PallasGPU(interpret=True), small=True) if s.name == name)
    assert step.run() is None


@gpu_interpreted
@pytest.mark.parametrize("small", [True, pytest.param(False, marks=slow)])
def test_parts_of_the_gpu_kernels_are_right_in_the_interpreter(small):
    from posenc_jax.kernels.checks.gpu_primitives import primitives

    parts = primitives(True, small=small)
    assert {part.name: place for part in parts if (place := part.run()) is not None} == {}


QUICK = ("the last block of keys of a row is the one before", "a tile is left out of dk")


def _marks(fault):
    if fault.gpu:
        return [gpu_interpreted]
    return [] if fault.name in QUICK else [slow]


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, id=fault.name, marks=_marks(fault)) for fault in FAULTS]
)
def test_an_injected_fault_has_its_place(fault):
    with injected(fault):
        (step,) = selected(fault.gpu, (fault.step,))
        assert re.search(fault.place, outcome(step) or "right")


@slow
@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=[gpu_interpreted] if fault.gpu else [])
        for fault in FAULTS
    ],
)
def test_the_steps_that_find_a_fault(fault):
    assert {*outcomes(fault)} == {fault.step, *fault.fails}


SETTING = "jax_pallas_poison_buffers"


def test_poisoned_memory():
    """As in the second run of a failed step on TPU."""

    def kernel(out, integers, floats, *scratch):
        poison(scratch)
        floats[...], integers[...] = scratch[0][...], scratch[1][...]
        out[...] = jnp.zeros(out.shape)

    kinds = [(8, 128), jnp.float32], [(8, 128), jnp.int32]
    shapes = [jax.ShapeDtypeStruct(*kinds[n]) for n in (0, 1, 0)]
    scratch = [pltpu.VMEM(*kind) for kind in kinds]
    call = pl.pallas_call(kernel, out_shape=shapes, scratch_shapes=scratch, interpret=True)
    _, integers, floats = call()
    assert np.isnan(floats).all() and (np.asarray(integers) == -(2**31)).all()


@slow
@pytest.mark.needs("jax>=0.12")
@pytest.mark.parametrize("name", [SOFTCAP, BACKWARD, "backward: array of all pairs", DECODE])
def test_kernels_read_no_poisoned_memory(name, monkeypatch):
    kernels, was = [], getattr(jax.config, SETTING)
    for module in (forward, backward, backward_pairs, decode):
        monkeypatch.setattr(module, "poison", lambda x: kernels.append(poison(x)))
    cases.executable.cache_clear()
    jax.config.update(SETTING, True)
    try:
        (step,) = (step for step in steps(interpret=True, small=True) if step.name == name)
        assert step.run() is None and kernels
    finally:
        jax.config.update(SETTING, was)
        cases.executable.cache_clear()


def test_a_wrong_number_is_named_by_its_place():
    case = Case("no rule", length=300, dtype="float32")
    x = cases.inputs(case)
    want = cases.expected(case, x, gradients=True)
    got = {name: y.copy() for name, y in want.items()}
    assert places.first_wrong(case, got, want) is None
    got["lse"][1, 0, 140] = np.nan
    got["output"][1, 0, 140] = np.nan
    got["dk"][0, 1] *= 1.001
    said = places.first_wrong(case, got, want)
    assert said.startswith("output: batch 1, head 0, tile row 1, tile column 0: nan")
    got |= {name: want[name] for name in ("lse", "output")}
    assert places.first_wrong(case, got, want).startswith("dk: batch 0, head 1, ")
    got["dk"] = want["dk"] * np.where(np.arange(2) == 1, 1.0005, 1.0)[:, None, None]
    case = cases.dataclasses.replace(case, dtype="bfloat16")
    assert places.first_wrong(case, got, want) is None
    got["dv"] = want["dv"] * 1.01
    assert (
        places.first_wrong(case, got, want) == "dv: batch 0, head 0: 1.0100 times what is expected"
    )
    again = {name: y.astype(np.float32) for name, y in want.items()}
    other = {name: y.copy() for name, y in again.items()}
    other["dq"][0, 1, 150, 3] = np.nextafter(other["dq"][0, 1, 150, 3], np.float32(9))
    assert "dq: other bits at batch 0, head 1, tile row 1" in places.other_bits(case, other, again)
