"""Benchmarks at tiny size: ratios, files, and the selection of peers."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import posenc_jax as pe
from experiments import bench
from experiments.__main__ import main
from experiments.bench import WARM_HEAP, decode, llama, released, rope, use_warm_heap
from experiments.bench.cases import attend_with, make_arguments, named_schemes
from experiments.bench.peers import Case, agreeing
from experiments.bench.timing import side_by_side
from experiments.errors import ConfigError
from experiments.runs.environment import processor
from tests.support import slow


def test_ratios_are_to_the_first_case():
    a, b = side_by_side({"a": lambda: jnp.zeros(3), "b": lambda: jnp.ones(3)}, rounds=3, seconds=0)
    assert (a.name, a.ratio, a.median_ratio, a.rounds) == ("a", 1.0, 1.0, 3)
    assert b.ratio == b.least / a.least


def test_bench_rope_at_tiny_size(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rope, "SHAPES", ((1, 8, 2, 4),))
    monkeypatch.setattr(rope, "DTYPES", {"float32": jnp.float32})
    path = tmp_path / "rope.json"
    arguments = ["rope", "--cold-heap", "--rounds=2", "--seconds=0", f"--json={path}"]
    assert bench.main(arguments) == 0
    out, written = capsys.readouterr().out, json.loads(path.read_text())
    assert "heap: as the system has it" in out and "x + 1, y + 1" in out
    assert "concatenating" in out
    x, positions = jax.random.normal(jax.random.key(0), (1, 8, 2, 4)), jnp.arange(8)
    expected = pe.apply_rope(x, positions, theta=100.0)
    np.testing.assert_allclose(rope.concatenating(x, 100.0), expected, atol=1e-5)
    assert [r["what"] for r in written["results"]] == ["forward", "forward+backward"]


@slow
def test_bench_attention_at_tiny_size(tmp_path, capsys):
    path = tmp_path / "attention.json"
    arguments = ["attention", "--cold-heap", "--rounds=1", "--seconds=0", "--lengths=8"]
    arguments += ["--heads=2", "--head-dim=4", "--schemes=t5", f"--json={path}"]
    assert bench.main(arguments) == 0
    assert "compile s" in capsys.readouterr().out
    results = json.loads(path.read_text())["results"]
    assert [r["shape"][1] for r in results] == [8]
    names = ["none", "t5", "jax.nn without bias", "jax.nn with T5 matrix"]
    assert [row["name"] for row in results[0]["rows"]] == names
    assert all(row["megabytes"] > 0 and row["median"] > 0 for row in results[0]["rows"])


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


def test_schemes_by_name_and_option():
    sizes = {"num_heads": 4, "head_dim": 8, "model_dim": 32, "max_length": 16}
    schemes = named_schemes(
        "shaw:values=false:clip=5, learned,posenc_jax:ALiBi,none,rope+alibi", sizes
    )
    assert list(schemes)[:3] == ["none", "shaw:values=false:clip=5", "learned"]
    assert schemes["shaw:values=false:clip=5"] == pe.Shaw(4, 8, clip=5, values=False)
    assert schemes["rope+alibi"] == pe.chain(pe.RoPE(head_dim=8), pe.ALiBi(num_heads=4))
    assert schemes["posenc_jax:ALiBi"] == pe.ALiBi(4)
    assert schemes["learned"] == pe.LearnedAbsolute(max_length=16, model_dim=32)
    for wrong, says in (
        ("rpoe", "unknown scheme 'rpoe'; did you mean 'rope'"),
        ("shaw:clp=5", "unknown option of Shaw; did you mean 'clip'"),
        ("shaw:clip=far", "must be a valid integer, got 'far'"),
        ("shaw:num_heads=5", "5, but the model of the benchmark has 4"),
    ):
        with pytest.raises(ConfigError, match=says):
            named_schemes(wrong, sizes)


def test_schemes_that_read_x_are_given_x():
    shape = 1, 3, 2, 4
    assert len(make_arguments(pe.Shaw(2, 4), shape, jnp.float32)) == 4
    scheme = pe.FoX(num_heads=2, model_dim=8)
    *_, x = arguments = make_arguments(scheme, shape, jnp.float32)
    assert x.shape == (1, 3, 8)
    assert jax.eval_shape(attend_with(scheme), *arguments).shape == shape


def test_bench_decode_at_tiny_size(tmp_path, capsys):
    path = tmp_path / "decode.json"
    arguments = ["decode", "--cold-heap", "--slots=32", "--heads=2", "--head-dim=4"]
    arguments += ["--tokens=1", "--schemes=t5", "--rounds=1", "--seconds=0"]
    assert bench.main([*arguments, f"--json={path}"]) == 0
    assert "one token after 31 in the cache" in capsys.readouterr().out
    results = json.loads(path.read_text())["results"]
    assert [(r["tokens"], r["slots"]) for r in results] == [(1, 32)]
    names = ["none", "t5", "jax.nn without bias", "jax.nn with T5 rows"]
    assert [row["name"] for row in results[0]["rows"]] == names


def test_decode_case_equals_attention_over_the_whole_sequence():
    scheme, shape = pe.RoPE(head_dim=4), (1, 16, 2, 4)
    arguments = make_arguments(scheme, shape, jnp.float32)
    whole = jax.jit(attend_with(scheme))(*arguments)
    case = decode.our_case(scheme, arguments, tokens=3)
    for _ in range(2):
        np.testing.assert_allclose(case.call(), whole[:, -3:], atol=1e-5)


def test_bench_llama_at_tiny_size(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "clear_caches", lambda: None)  # Other tests go on with the programs.
    path = tmp_path / "llama.json"
    arguments = ["llama", "--cold-heap", "--rounds=1", "--seconds=0", "--lengths=8", "--layers=1"]
    arguments += ["--heads=2", "--kv-heads=1", "--head-dim=4", "--compilations=1", f"--json={path}"]
    assert bench.main(arguments) == 0
    assert "s of tracing and compiling, 1.00 times as much" in capsys.readouterr().out
    by_hand, *ours = json.loads(path.read_text())["results"][0]["rows"]
    assert by_hand["compile_ratio"] == by_hand["ratio"] == 1.0
    assert [row["name"] for row in ours] == ['posenc_jax, implementation="jax"', "posenc_jax"]
    assert all(row["compile_seconds"] > 0 for row in ours)
    with pytest.raises(RuntimeError, match="the models differ"):
        llama.check_losses({"by hand": jnp.float32(1.0), "posenc_jax": jnp.float32(1.001)})


def test_bench_released_at_tiny_size(tmp_path, capsys, monkeypatch):
    small = {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2}
    small |= {"intermediate_size": 20, "vocab_size": 1000}
    monkeypatch.setattr(released, "CONFIG", released.CONFIG | small)
    path = tmp_path / "released.json"
    arguments = ["released", "--cold-heap", "--layers=1", "--slots=48", "--batch=1", "--rounds=1"]
    arguments += ["--dtypes", "float32", "--prompt=5", "--without", "torch", f"--json={path}"]
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
    monkeypatch.setattr("os.execve", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr("platform.libc_ver", lambda: ("glibc", "2.36"))
    use_warm_heap(["rope", "--rounds=2"])
    ((path, command, env),) = calls
    assert [path, *command[1:]] == [
        sys.executable, "-m", "experiments", "bench", "rope", "--rounds=2"
    ]  # fmt: skip
    assert env["GLIBC_TUNABLES"].count(":") == len(WARM_HEAP) - 1
    monkeypatch.setattr("os.environ", env)
    use_warm_heap(["rope"])  # The new process goes on.
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required"),
        (["roep"], "invalid choice: 'roep'"),
        (["rope", "--rounds=many"], "argument --rounds: must be an integer from 1, got 'many'"),
        (["rope", "--rounds=0"], "argument --rounds: must be an integer from 1, got '0'"),
        (["decode", "--slots=16,-1"], "argument --slots: must be an integer from 1, got '-1'"),
        (["attention", "--heads=0"], "argument --heads: must be an integer from 1, got '0'"),
        (["decode", "--schemes=roep"], "unknown scheme 'roep'; did you mean 'rope'?"),
    ],
)
def test_bad_arguments_exit_with_one_line(arguments, message, capsys, monkeypatch):
    monkeypatch.setattr("experiments.bench.use_warm_heap", lambda arguments: None)
    assert main(["bench", *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err and err.count("\n") == 1
