"""Benchmarks at tiny size: ratios, files, and the selection of peers."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from experiments import bench
from experiments.bench import WARM_HEAP, decode, masks, released, use_warm_heap
from experiments.bench.cases import attend_with, make_arguments
from experiments.bench.peers import Case, agreeing
from experiments.bench.timing import side_by_side
from experiments.runs.environment import processor
from tests.experiments.one_line import refusal
from tests.support import slow


@pytest.fixture(autouse=True)
def cold(monkeypatch):
    """No process starts again, and none collects the garbage of all tests."""
    monkeypatch.setenv("POSENC_BENCH_WARM_HEAP", "1")
    monkeypatch.setattr("gc.collect", lambda: 0)


def test_ratios_are_to_the_first_case():
    a, b = side_by_side({"a": lambda: jnp.zeros(3), "b": lambda: jnp.ones(3)}, rounds=3, seconds=0)
    assert (a.name, a.ratio, a.median_ratio, a.rounds) == ("a", 1.0, 1.0, 3)
    assert b.ratio == b.least / a.least


@slow
def test_bench_attention_at_tiny_size(tmp_path, capsys):
    path = tmp_path / "attention.json"
    arguments = ["attention", "--rounds=1", "--seconds=0", "--lengths=8"]
    arguments += ["--heads=2", "--head-dim=4", "--schemes=t5", f"--json={path}"]
    assert bench.main(arguments) == 0
    assert "compile s" in capsys.readouterr().out
    results = json.loads(path.read_text())["results"]
    assert [r["shape"][1] for r in results] == [8]
    names = ["none", "t5", "jax.nn without bias", "jax.nn with T5 matrix"]
    assert [row["name"] for row in results[0]["rows"]] == names
    assert all(row["megabytes"] > 0 and row["median"] > 0 for row in results[0]["rows"])


@slow
def test_bench_masks_at_tiny_size(tmp_path, capsys):
    path = tmp_path / "masks.json"
    arguments = ["masks", "--length=256", "--heads=2", "--head-dim=8", "--rounds=1", "--seconds=0"]
    assert bench.main([*arguments, f"--json={path}"]) == 0
    assert "memory MB" in capsys.readouterr().out
    results = json.loads(path.read_text())["results"]
    assert [r["pattern"] for r in results] == list(masks.patterns(256))
    assert all(0 < r["tiles"] <= 1 and len(r["rows"]) >= 4 for r in results)


@pytest.mark.parametrize("wrong", [1.1, jnp.nan])
def test_cases_with_other_numbers_are_refused(wrong):
    ours = {"none": Case(lambda: (jnp.ones(3), jnp.ones(3)))}
    near = {"near": Case(lambda: (jnp.ones(3), jnp.full(3, 1.0 + 1e-5)), like="none")}
    assert agreeing(near, ours) == near
    off = {"off": Case(lambda: (jnp.ones(3), jnp.full(3, wrong)), like="none")}
    with pytest.raises(RuntimeError, match="off differs by"):
        agreeing(off, ours)


def test_the_processor_is_named(tmp_path):
    info = tmp_path / "cpuinfo"
    info.write_text(
        "processor : 0\ncpu family : 6\nmodel : 143\nmodel name : Xeon\n"
        "flags : fpu avx2 avx512f amx_tile\n\nprocessor : 1\n"
    )
    assert processor(info) == "Xeon, family 6 model 143, avx512f, amx_tile"
    info.write_text("processor : 0\nFeatures : fp asimd sve\n")
    assert processor(info).endswith(", sve")
    assert processor(tmp_path / "none")


def test_schemes_that_read_x_are_given_x():
    shape = 1, 3, 2, 4
    assert len(make_arguments(pe.Shaw(2, 4), shape, jnp.float32)) == 4
    scheme = pe.FoX(num_heads=2, model_dim=8)
    *_, x = arguments = make_arguments(scheme, shape, jnp.float32)
    assert x.shape == (1, 3, 8)
    assert jax.eval_shape(attend_with(scheme), *arguments).shape == shape


@slow
def test_decode_cases_equal_attention_over_the_whole_sequence():
    q, k, v, params = arguments = make_arguments(pe.RoPE(head_dim=4), (1, 16, 2, 4), jnp.float32)
    for scheme, case in (
        (pe.RoPE(head_dim=4), decode.our_case(pe.RoPE(head_dim=4), arguments)),
        (pe.NoPE(), decode.jax_nn_case(q, k, v)),
    ):
        whole = jax.jit(attend_with(scheme))(q, k, v, params)
        for _ in range(2):
            np.testing.assert_allclose(case.call(), whole[:, -1:], atol=1e-5)


@slow
def test_bench_released_at_tiny_size(tmp_path, capsys, monkeypatch):
    small = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
    small |= {"intermediate_size": 20, "vocab_size": 1000}
    monkeypatch.setattr(released, "CONFIG", released.CONFIG | small)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    path = tmp_path / "released.json"
    arguments = ["released", "--layers=1", "--slots=48", "--batch=1", "--rounds=1"]
    arguments += ["--dtypes", "float32", "--prompt=5", f"--json={path}"]
    assert bench.main(arguments) == 0
    assert "logits of jax.nn differ by" in capsys.readouterr().out
    *decoded, prefill = json.loads(path.read_text())["results"]
    titles = [f"decode: float32, batch 1, {n} tokens in 48 slots" for n in (6, 24)]
    assert [x["title"] for x in decoded] == titles
    for result in decoded:
        assert [row["name"] for row in result["rows"]] == ["ours", "ours, scan", "jax.nn"]
    assert [row["name"] for row in prefill["rows"]] == ["ours"]


def test_bench_restarts_with_a_warm_heap(monkeypatch):
    calls = []
    monkeypatch.delenv("POSENC_BENCH_WARM_HEAP")
    monkeypatch.setattr("os.execve", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    use_warm_heap(["attention", "--rounds=2"])
    ((path, command, env),) = calls
    assert [path, *command[1:]] == [
        sys.executable, "-m", "experiments", "bench", "attention", "--rounds=2"
    ]  # fmt: skip
    assert env["GLIBC_TUNABLES"].count(":") == len(WARM_HEAP) - 1
    monkeypatch.setattr("os.environ", env)
    use_warm_heap(["attention"])  # The new process goes on.
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["attention", "--rounds=0"], "argument --rounds: must be an integer from 1, got '0'"),
        (["released", "--slots=16,-1"], "argument --slots: must be an integer from 1, got '-1'"),
        (["masks", "--patterns=squares"], "unknown pattern 'squares'; use some of block diffusion"),
    ],
)
def test_bad_arguments_exit_with_one_line(arguments, message, capsys):
    assert message in refusal(capsys, "bench", *arguments)
