"""The steps that run on chips, in the interpreter; tests/mutations.py has faults that they find."""

import dataclasses

import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from posenc_jax.kernels.checks import cases
from posenc_jax.kernels.checks.cases import Case
from posenc_jax.kernels.checks.steps import FAMILIES, first_wrong, steps, wrong_count
from posenc_jax.kernels.gpu.implementation import PallasGPU
from tests.makers import kernels_support
from tests.support import gpu_interpreted, slow, slow_but

SOME = ("backward: table, segments, softcap", "forward: last queries")
STEPS = [step.name for step in steps()]


def test_names_are_unique():
    assert len(STEPS) == len({*STEPS})
    assert [*dict.fromkeys(name.partition(":")[0] for name in STEPS)] == [*FAMILIES]


def _step(name, *implementation, **options):
    (step,) = (x for x in steps(*implementation, small=True, **options) if x.name == name)
    return step


@pytest.mark.parametrize("name", slow_but(STEPS, *SOME))
def test_steps_are_right_in_the_interpreter(name):
    """Slow ones in float32, whose bounds are narrow; one without races and unwritten memory."""
    checked = pltpu.InterpretParams(detect_races=True, uninitialized_memory="nan")
    step = _step(name, interpret=checked if name == SOME[0] else True)
    changes = {"batch": 1} if name == SOME[0] else {} if name in SOME else {"dtype": "float32"}
    step = dataclasses.replace(step, case=dataclasses.replace(step.case, **changes))
    assert step.run() is None


@slow
@gpu_interpreted
@pytest.mark.parametrize("name", SOME)
def test_steps_of_the_gpu_kernels_are_right_in_the_interpreter(name):
    assert _step(name, PallasGPU(interpret=True)).run() is None


@slow
@pytest.mark.parametrize(("word", "name"), [("xla", "no rule"), ("jax", "float32")])
def test_other_implementations_are_right(word, name):
    """The second returns no log-sum-exp; in bfloat16, `jax.nn` sums dv in bfloat16 on CPUs."""
    with cases.jax.numpy_dtype_promotion("standard"):  # As `jax.nn` needs.
        assert _step(f"backward: {name}", word).run() is None
    with pytest.raises(NotImplementedError):
        _step("forward: pair", "jax").run()


@pytest.mark.parametrize("shape", [(2,), (2, 120)])
def test_gradients_of_parameters_are_checked_as_a_whole(shape):
    """2 % lie within the bound of single numbers in bfloat16, 0.1 % within all."""
    want = {"gradient of heads": np.random.default_rng(0).normal(size=shape)}
    for factor, place in (1.001, None), (1.02, "[]: 1.0200 times what is expected"):
        got = {name: factor * x for name, x in want.items()}
        wrong = first_wrong(Case(""), got, want)
        assert wrong == (place and f"gradient of heads: {place}")


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


@slow
def test_the_page_says_what_implementations_answer():
    """As `makers/kernels_support.py` prints its table."""
    assert kernels_support.table() in kernels_support.PAGE.read_text()
