"""The steps that run on chips, in the interpreter; tests/mutations.py has faults that they find."""

import dataclasses

import numpy as np
import pytest

from posenc_jax.kernels.checks import cases
from posenc_jax.kernels.checks.cases import Case
from posenc_jax.kernels.checks.steps import FAMILIES, first_wrong, steps, wrong_count
from posenc_jax.kernels.gpu.implementation import PallasGPU
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
    case = dataclasses.replace(case, dtype="float32")
    x = cases.inputs(case)
    with cases.jax.default_matmul_precision("highest"):
        got = cases.run(case, "reference", x, gradients=True, lse=True)
    assert first_wrong(case, got, cases.expected(case, x, gradients=True)) is None


SOME = (
    "forward: table, segments, softcap",
    "backward: table by distance",
    "decode: 2 heads of keys",
)
STEPS = [step.name for step in steps()]


def test_names_are_unique():
    assert len(STEPS) == len({*STEPS})
    assert [*dict.fromkeys(name.partition(":")[0] for name in STEPS)] == [*FAMILIES]


@pytest.mark.parametrize("name", [pytest.param(x, marks=() if x in SOME else slow) for x in STEPS])
def test_steps_are_right_in_the_interpreter(name):
    """Slow ones in float32, whose bounds are narrow."""
    (step,) = (step for step in steps(interpret=True, small=True) if step.name == name)
    if name not in SOME:
        case = dataclasses.replace(step.case, dtype="float32")
        step = dataclasses.replace(step, case=case)
    assert step.run() is None


@slow
@gpu_interpreted
@pytest.mark.parametrize("name", SOME)
def test_steps_of_the_gpu_kernels_are_right_in_the_interpreter(name):
    (step,) = (s for s in steps(PallasGPU(interpret=True), small=True) if s.name == name)
    assert step.run() is None


@pytest.mark.parametrize(("word", "name"), [("xla", "no rule"), ("jax", "float32")])
def test_other_implementations_are_right(word, name):
    """The second returns no log-sum-exp; in bfloat16, `jax.nn` sums dv in bfloat16 on CPUs."""
    (step,) = (s for s in steps(word, small=True) if s.name == f"backward: {name}")
    with cases.jax.numpy_dtype_promotion("standard"):  # As `jax.nn` needs.
        assert step.run() is None
    refused = next(s for s in steps("jax", family="forward") if s.name == "forward: pair")
    with pytest.raises(NotImplementedError):
        refused.run()


@pytest.mark.parametrize("rule", [name for name in cases.RULES if name != "none"])
def test_gradients_of_parameters_are_checked_as_a_whole(rule):
    """2 % lie within the bound of single numbers in bfloat16, 0.1 % within all."""
    case = Case("", rule, length=120, dim=64)
    want = cases.expected(case, cases.inputs(case), gradients=True)
    for name in (name for name in want if name.startswith("gradient")):
        assert first_wrong(case, want | {name: 1.001 * want[name]}, want) is None
        place = first_wrong(case, want | {name: 1.02 * want[name]}, want)
        assert place == f"{name}: []: 1.0200 times what is expected"


def test_a_wrong_number_is_named_by_its_place():
    case = Case("", length=300, dtype="float32")
    x = cases.inputs(case, zero=True)
    want = cases.expected(case, x, gradients=True)
    got = {name: y.copy() for name, y in want.items()}
    assert first_wrong(case, got, want) is None and wrong_count(got, want) is None
    got["lse"][1, 0, 140] += np.log(142 / 141)
    assert wrong_count(got, want) == "lse: batch 1, head 0, token 140 sees 142 keys, expected 141"
    got = want | {"output": np.where(np.arange(300)[:, None] == 140, np.nan, want["output"])}
    assert first_wrong(case, got, want).startswith("output: batch 0, head 0, token 140: nan, exp")
    got = want | {"dv": want["dv"] * np.where(np.arange(2) == 1, 1.001, 1.0)[:, None, None]}
    assert first_wrong(case, got, want).startswith("dv: batch 0, head 1, ")
    case = dataclasses.replace(case, dtype="bfloat16")
    assert first_wrong(case, got, want) is None
    got["dv"] = want["dv"] * 1.01
    assert first_wrong(case, got, want) == ("dv: batch 0, head 0: 1.0100 times what is expected")
