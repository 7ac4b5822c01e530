"""Benchmarks run in small, print ratios, and write what they printed."""

import json
import subprocess
import sys
from xml.etree import ElementTree

import jax.numpy as jnp
import numpy as np
import pytest
from test_user_schemes import FoX

import posenc_jax as pe
from experiments import bench
from experiments.bench import decode, rope
from experiments.bench.clock import side_by_side
from experiments.bench.machine import WARM_HEAP
from experiments.bench.named import attend_with, make_arguments, named_schemes, places
from experiments.bench.peers import Case, must_agree
from experiments.strict import ConfigError


def test_the_first_case_is_the_reference():
    a, b = side_by_side({"a": lambda: jnp.zeros(3), "b": lambda: jnp.ones(3)}, rounds=3, seconds=0)
    assert (a.name, a.ratio, a.median_ratio, a.rounds) == ("a", 1.0, 1.0, 3)
    assert b.ratio == b.least / a.least


def test_rope_in_small(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rope, "SHAPES", ((1, 8, 2, 4),))
    monkeypatch.setattr(rope, "TABLE", (64, 8))
    path = tmp_path / "rope.json"
    arguments = ["rope", "--cold-heap", "--rounds=2", "--seconds=0", "--peers", f"--json={path}"]
    assert bench.main(arguments) == 0
    out, written = capsys.readouterr().out, json.loads(path.read_text())
    assert "heap: as the system has it" in out and "x + 1, y + 1" in out
    assert "jax concatenating" in out
    assert [r["what"] for r in written["results"]] == ["forward", "forward+backward"] * 2 + [
        "table"
    ]
    errors = written["results"][-1]["errors"]
    assert errors["posenc_jax.cos_sin"] < 2e-7 < 1e-3 < errors["jnp.cos and jnp.sin"]


def test_positions_that_are_given_are_cases_of_their_own(capsys):
    arguments = ["attention", "--cold-heap", "--rounds=1", "--seconds=0", "--lengths=16"]
    arguments += ["--heads=2", "--head-dim=4", "--schemes=alibi", "--forward", "--naive-to=0"]
    assert bench.main([*arguments, "--positions"]) == 0
    out = capsys.readouterr().out
    assert all(f"alibi, {place} " in out for place in ("in order", "shuffled", "4 texts"))
    scheme = pe.ALiBi(num_heads=2)
    given = make_arguments(scheme, (1, 16, 2, 4), jnp.float32)
    plain = attend_with(scheme)(*given)
    at = places(16)
    np.testing.assert_allclose(attend_with(scheme, **at["in order"])(*given), plain, atol=1e-6)
    texts = attend_with(scheme, **at["4 texts"])(*given)
    np.testing.assert_allclose(texts[:, :4], plain[:, :4], atol=1e-6)
    assert np.abs(texts[:, 4:] - plain[:, 4:]).max() > 0.1
    shuffled = places(100)["shuffled"]["positions"][0].tolist()
    assert shuffled != list(range(100)) and sorted(shuffled[:64]) == list(range(64))
    assert sorted(shuffled) == list(range(100))


def test_attention_in_small(tmp_path, capsys):
    json_path, svg_path = tmp_path / "attention.json", tmp_path / "attention.svg"
    arguments = ["attention", "--cold-heap", "--rounds=1", "--seconds=0", "--lengths=16,8"]
    arguments += ["--heads=2", "--head-dim=4", "--schemes=t5:num_buckets=8", "--devices=2"]
    arguments += [f"--json={json_path}", f"--plot={svg_path}"]
    assert bench.main(arguments) == 0
    assert "compile s" in capsys.readouterr().out
    results = json.loads(json_path.read_text())["results"]
    assert [r["shape"][1] for r in results] == [8, 16]
    names = ["none", "none, 2 devices", "t5:num_buckets=8", "t5:num_buckets=8, 2 devices"]
    names += ["jax.nn without bias", "jax.nn with T5 matrix"]
    assert [row["name"] for row in results[1]["rows"]] == names
    assert all(row["megabytes"] > 0 and row["median"] > 0 for row in results[1]["rows"])
    drawn = ElementTree.parse(svg_path).getroot()
    assert "temporary memory in MB" in "".join(drawn.itertext())


def test_what_is_measured_must_be_the_same():
    ours = Case(lambda: (jnp.ones(3), jnp.ones(3)))
    must_agree("theirs", Case(lambda: (jnp.ones(3), jnp.full(3, 1.0 + 1e-5))), ours)
    with pytest.raises(RuntimeError, match="theirs is not what is measured here: the gradient of"):
        must_agree("theirs", Case(lambda: (jnp.ones(3), jnp.full(3, 1.1))), ours)
    with pytest.raises(RuntimeError, match="gives 1 arrays, wanted 2"):
        must_agree("theirs", Case(lambda: jnp.ones(3)), ours)


def test_schemes_by_name_and_option():
    sizes = {"num_heads": 4, "head_dim": 8, "model_dim": 32, "max_length": 16}
    found = named_schemes("shaw:values=false:clip=5,learned,posenc_jax:ALiBi,none", sizes)
    assert list(found)[:3] == ["none", "shaw:values=false:clip=5", "learned"]
    assert found["shaw:values=false:clip=5"] == pe.Shaw(4, 8, clip=5, values=False)
    assert found["posenc_jax:ALiBi"] == pe.ALiBi(4)
    assert found["learned"] == pe.LearnedAbsolute(max_length=16, model_dim=32)
    for wrong, says in (
        ("rpoe", "unknown scheme 'rpoe'; did you mean 'rope'"),
        ("shaw:clp=5", "unknown option of Shaw; did you mean 'clip'"),
        ("shaw:clip=far", "must be an integer, got 'far'"),
        ("shaw:num_heads=5", "5, but the model of the benchmark has 4"),
    ):
        with pytest.raises(ConfigError, match=says):
            named_schemes(wrong, sizes)


def test_a_scheme_that_reads_the_embedding_gets_it():
    shape = 1, 3, 2, 4
    assert len(make_arguments(pe.Shaw(2, 4), shape, jnp.float32)) == 4
    scheme = FoX(num_heads=2, model_dim=8)
    *_, x = arguments = make_arguments(scheme, shape, jnp.float32)
    assert x.shape == (1, 3, 8)
    assert attend_with(scheme)(*arguments).shape == shape


def test_decode_in_small(tmp_path, capsys):
    json_path, svg_path = tmp_path / "decode.json", tmp_path / "decode.svg"
    arguments = ["decode", "--cold-heap", "--slots=16,32", "--heads=2", "--head-dim=4"]
    arguments += ["--tokens=1,3", "--schemes=t5,rope", "--rounds=1", "--seconds=0"]
    assert bench.main([*arguments, f"--json={json_path}", f"--plot={svg_path}"]) == 0
    assert "3 tokens at once after 29 in the cache" in capsys.readouterr().out
    results = json.loads(json_path.read_text())["results"]
    assert [(r["tokens"], r["slots"]) for r in results] == [(1, 16), (1, 32), (3, 16), (3, 32)]
    names = ["none", "t5", "rope", "jax.nn without bias", "jax.nn with T5 rows"]
    assert [row["name"] for row in results[0]["rows"]] == names
    assert "one token" in "".join(ElementTree.parse(svg_path).getroot().itertext())


def test_a_cache_is_decoded_from_as_a_whole_sequence_is_attended_to():
    scheme, shape = pe.RoPE(head_dim=4), (1, 16, 2, 4)
    arguments = make_arguments(scheme, shape, jnp.float32)
    whole = attend_with(scheme)(*arguments)
    case = decode.our_case(scheme, arguments, tokens=3)
    for _ in range(2):
        np.testing.assert_allclose(case.call(), whole[:, -3:], atol=1e-5)


def test_memory_in_small(tmp_path, capsys):
    json_path, svg_path = tmp_path / "memory.json", tmp_path / "memory.svg"
    arguments = ["memory", "--cold-heap", "--lengths=512,1024", "--heads=2", "--head-dim=4"]
    arguments += ["--schemes=t5", f"--json={json_path}", f"--plot={svg_path}"]
    assert bench.main(arguments) == 0
    assert "a doubling" in capsys.readouterr().out
    rows = {(r["name"], r["what"]): r for r in json.loads(json_path.read_text())["results"]}
    assert len(rows) == 8
    ours, theirs = (rows[name, "forward+backward"] for name in ("t5", "jax.nn with T5 matrix"))
    assert ours["growth"] < 3 < theirs["growth"]
    assert theirs["lengths"]["1024"]["largest_megabytes"] >= 4 * 2 * 1024**2 / 1e6
    assert "T5 matrix" in "".join(ElementTree.parse(svg_path).getroot().itertext())


def test_the_heap_is_kept_by_default():
    code = (
        "import os, sys; from experiments.bench.machine import use_warm_heap; "
        "os.execve = lambda path, command, env: print(*command[1:], env['GLIBC_TUNABLES']); "
        "use_warm_heap(['rope', '--rounds=2'])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    if run.stdout:  # glibc
        command, _, tunables = run.stdout.strip().rpartition(" ")
        assert command == "-m experiments.bench rope --rounds=2"
        assert tunables.count(":") == len(WARM_HEAP) - 1


@pytest.mark.parametrize("arguments", [[], ["roep"], ["rope", "--rounds=many"]])
def test_bad_arguments_end_with_status_two(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        bench.main(arguments)
    assert stop.value.code == 2
    assert "usage: python -m experiments bench" in capsys.readouterr().err
