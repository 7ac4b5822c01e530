"""Verdicts on kernels without a chip: their files, the choice of `None`, and the program.

`jax.local_devices` names a chip that is not there, as far as verdicts and choices ask.
"""

import dataclasses
import functools
import json
import logging
import subprocess
import sys
import threading
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engine.kernel_cases import assert_close, described
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax.__main__ import main as facts
from posenc_jax.engine import api, verdicts
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.rules import as_tuple
from posenc_jax.engine.tpu import forward
from posenc_jax.engine.tpu.implementation import PallasTPU
from posenc_jax.engine.verdicts import Subject, Verdict, key_of
from posenc_jax.prove import __main__ as program
from posenc_jax.prove import verdicts as prove
from posenc_jax.prove.cases import RULES, Case, executable
from posenc_jax.prove.steps import Step, steps

T5 = Subject("distance", "bfloat16", 64)
RIGHT, WRONG = Verdict(None, 3, 1e9), Verdict("forward: row 1, head 0", 3, 1e9)


class Chip:
    """A chip that is there, as far as anybody asks; `restart` begins a new process on it."""

    def __init__(self, monkeypatch):
        self.monkeypatch, self.device = monkeypatch, types.SimpleNamespace()
        self.device.client = types.SimpleNamespace(platform_version="libtpu 1")
        self.device.device_kind, self.device.platform = "TPU v6 lite", "tpu"
        self.processes = 1
        for name, answer in {
            "local_devices": lambda: [self.device],
            "default_backend": lambda: "tpu",
            "device_count": lambda: 1,
            "process_count": lambda: self.processes,
        }.items():
            monkeypatch.setattr(jax, name, answer)
        self.restart()

    def restart(self):
        self.monkeypatch.setattr(verdicts, "_STARTED", time.time())
        verdicts._verdict.cache_clear()
        verdicts._are_right.cache_clear()


@pytest.fixture
def chip(monkeypatch, tmp_path):
    monkeypatch.setenv(verdicts.FOLDER, str(tmp_path / "new" / "folder"))
    chip = Chip(monkeypatch)
    yield chip
    chip.restart()


def _chosen(
    *rules, length=512, keys=512, value_dim=64, dtype=jnp.bfloat16, platform="tpu", **options
):
    """Returns the word of the implementation that `None` takes for [1, length, 2, 64]."""
    words, sharding = [], options.pop("sharding", None)

    def ask(q):
        k = jnp.zeros((1, keys, 2, 64), dtype)
        v = jnp.zeros((1, keys, 2, value_dim), dtype)
        call = pe.AttentionCall(is_causal=True, **options)
        problem = api.make_problem(q, k, v, as_tuple(rules), call)
        problem = dataclasses.replace(problem, needs_lse=call.return_lse)
        words.append(api.choose(problem, platform).name)

    jax.eval_shape(ask, jax.ShapeDtypeStruct((1, length, 2, 64), dtype, sharding=sharding))
    return words[0]


TABLE = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)


def _t5(**options):
    return _chosen(pe.T5(num_heads=2).rules({"table": TABLE}), **options)


def _write(verdict=RIGHT, *classes):
    """Writes the verdicts on classes of rules, by default those that T5 needs."""
    for name in classes or ("none", "distance"):
        verdicts.write(key_of(T5._replace(rule_class=name)), verdict)


def _line(caplog):
    """Returns the only line of the log, and forgets it."""
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    caplog.clear()
    return record.getMessage()


def test_the_life_of_a_verdict(chip, caplog):
    """The table of docs/kernels.md."""
    assert _t5() == _t5(length=1024, keys=1024) == "xla"
    assert _line(caplog) == (  # Once.
        'attention: implementation=None leaves out "pallas" for rule class none, distance, '
        "bfloat16, head dim 64 on TPU v6 lite: there is no verdict; to check its kernels there: "
        "python -m posenc_jax.prove --rule-class none distance --dtype bfloat16 --head-dim 64"
    )
    _write(RIGHT, "none")
    chip.restart()
    assert _t5() == "xla" and "--rule-class distance --dtype" in _line(caplog)

    _write()
    assert _t5() == "xla" and not caplog.records  # A process does not change its choices.
    chip.restart()
    assert _t5() == "pallas" and not caplog.records
    assert _t5(dtype=jnp.float32) == "xla" and "float32" in _line(caplog)

    _write(WRONG, "distance")
    chip.restart()
    assert _t5() == _t5() == "xla"
    line = _line(caplog)
    assert "for rule class distance, " in line
    assert "its kernels are wrong (forward: row 1, head 0); to check" in line

    for change in (
        lambda: setattr(chip.device.client, "platform_version", "libtpu 2"),
        lambda: setattr(chip.device, "device_kind", "TPU v5 lite"),
        lambda: chip.monkeypatch.setattr(jax, "__version__", "0.99"),
        lambda: chip.monkeypatch.setattr(verdicts, "_digest", lambda: "other sources"),
    ):
        _write()
        chip.restart()
        assert _t5() == "pallas"
        change()
        assert _t5() == "xla" and "there is no verdict" in _line(caplog)


def test_another_driver_of_a_gpu_needs_a_verdict(chip, tmp_path):
    file = tmp_path / "version"
    chip.monkeypatch.setattr(verdicts, "_DRIVER", file)
    without = key_of(T5)
    file.write_text("NVRM version: 580.65\nGCC version: 12\n")
    assert key_of(T5) == without  # A TPU.
    chip.device.platform = "gpu"
    assert key_of(T5).platform_version == "libtpu 1, NVRM version: 580.65"


def test_several_processes(chip, caplog):
    """Verdicts count in a folder that is named, if they were made before the processes started."""
    chip.processes = 2
    _write()
    assert _t5() == "pallas"
    _write(RIGHT._replace(time=time.time()))
    verdicts._verdict.cache_clear()
    verdicts._are_right.cache_clear()  # The same process.
    assert _t5() == "xla"
    assert _line(caplog).endswith(
        "--head-dim 64, before the processes start, with POSENC_JAX_CACHE_DIR naming a folder that "
        "they share"
    )
    chip.restart()
    assert _t5() == "pallas"

    chip.monkeypatch.setenv("XDG_CACHE_HOME", str(verdicts.folder().parent))
    verdicts.folder().rename(verdicts.folder().parent / "posenc_jax")
    chip.monkeypatch.delenv(verdicts.FOLDER)
    chip.restart()
    assert _t5() == "xla"
    chip.processes = 1
    chip.restart()
    assert _t5() == "pallas"

    chip.processes = 2
    chip.monkeypatch.setattr(verdicts, "check", lambda subject: pytest.fail("made while tracing"))
    chip.restart()
    assert _t5() == "xla"


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"key": {}, "verdict": {}}', b"\xff", None, ("fault", 3), ("time", "now")],
)
def test_a_damaged_file_is_a_line_and_no_verdict(chip, caplog, content):
    """`None`: the verdict of another key, under this one's name."""
    _write()
    path, other = (verdicts._path(key_of(T5._replace(head_dim=n))) for n in (64, 128))
    if isinstance(content, tuple):
        _write(RIGHT._replace(**dict([content])), "distance")
    elif content is None:
        verdicts.write(key_of(T5._replace(head_dim=128)), RIGHT)
        other.rename(path)
    else:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert _t5() == "xla"
    damaged, missing = (record.getMessage() for record in caplog.records)
    assert damaged.endswith(f"{path} is damaged") and "rule class distance" in missing
    assert [subject.rule_class for subject, _ in verdicts.here()] == ["none"]


def test_files_are_written_whole(chip):
    verdicts.write(key_of(T5), WRONG)
    verdicts.write(key_of(T5), RIGHT)
    (path,) = verdicts.folder().iterdir()
    assert set(json.loads(path.read_text())) == {"key", "verdict"}
    assert [*verdicts.here()] == [(T5, RIGHT)]
    chip.device.device_kind = "TPU7x"
    assert not [*verdicts.here()]


def test_problems_and_their_subjects(chip, caplog):
    """Each class of a problem's rules needs a verdict, and decode steps one for any rule."""
    features = jnp.zeros((1, 512, 2))
    fox = pe.SeparableBias(q_features=features, k_features=features)
    t5 = pe.T5(num_heads=2).rules({"table": np.zeros((2, 32), np.float32)})
    _write(RIGHT, "none", "distance", "separable")
    assert _chosen(t5) == _chosen(fox) == _chosen(t5, fox) == "pallas"
    assert not caplog.records
    positions = {"q_positions": jnp.arange(512), "k_positions": jnp.arange(512)}
    alibi = pe.ALiBi(num_heads=2).rules({})
    assert _chosen(alibi) == "pallas" and _chosen(alibi, **positions) == "xla"
    assert "rule class pair" in caplog.text

    # No verdict is about these, so that there is nothing to say.
    caplog.clear()
    transform = pe.LogitsTransform(_same)
    assert _chosen(transform) == "xla"
    assert _chosen(t5, value_dim=32) == "xla" and _chosen(t5, length=256, keys=256) == "xla"
    assert _chosen() == "splash" and not caplog.records
    assert _chosen(return_lse=True) == "pallas"

    token = {"length": 1, "q_positions": jnp.array([9000]), "keys": 2**13}
    token["k_positions"] = jnp.arange(2**13)
    assert _chosen(alibi, **token) == "dense" and "rule class decode" in caplog.text
    _write(RIGHT, "decode")
    chip.restart()
    assert _chosen(alibi, **token) == "pallas"
    token |= {"keys": 2**12, "k_positions": jnp.arange(2**12)}
    assert _chosen(alibi, **token) == "dense"


def _same(shared, head, row, col, q, k, logits, seen):
    return logits


def test_chips_that_cannot_be_asked_have_no_verdict(chip):
    """Programs for a described chip, and arrays whose devices a trace does not show."""
    _write()
    assert _t5() == "pallas"
    with described("TPU v5 lite"):
        assert _t5() == "xla"
    with described("TPU v6 lite"):
        assert _t5() == "pallas"
    chip.monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert _t5() == "xla"


def test_sharded_arrays(chip):
    """What cannot be divided over the devices keeps what it took before."""
    chip.device.device_kind = "cpu"  # As meshes of its devices say.
    chip.monkeypatch.setattr("posenc_jax.engine.tpu.implementation.unknown_kind", lambda: None)
    _write()
    for axes, word in (
        ((), "pallas"),
        ((None, None, "heads"), "pallas"),
        ((None, "data"), "xla"),
        ((None, None, None, "data"), "xla"),
    ):
        mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)
        assert _t5(sharding=NamedSharding(mesh, PartitionSpec(*axes))) == word, axes


def test_nothing_is_read_on_cpu(monkeypatch):
    monkeypatch.setattr(verdicts, "key_of", lambda subject: pytest.fail("asked for a verdict"))
    monkeypatch.setattr(verdicts, "folder", lambda: pytest.fail("looked for verdicts"))
    rules = pe.ALiBi(num_heads=1).rules({})
    jax.eval_shape(lambda q: pe.attention(q, q, q, rules=rules), jnp.zeros((1, 512, 1, 8)))


KERNELS = PallasTPU(Blocks(128, 128), Blocks(128, 128), interpret=True)


def _attend(x, implementation=None):
    """T5 in a tile, of queries, keys and values [1, 128, 2, 64] that are all x."""
    rules = pe.T5(num_heads=2).rules({"table": TABLE})
    return pe.attention(x, x, x, rules=rules, is_causal=True, implementation=implementation)


@functools.partial(jax.jit, static_argnums=0)
def _both(implementation, x):
    out, pull = jax.vjp(functools.partial(_attend, implementation=implementation), x)
    return out, *pull(x)


def _step(name="forward: one tile", run=lambda: None, subject=T5, family="forward"):
    return Step(name, family, *subject, run)


def _compare():
    """Compares the kernels with the reference, where nothing of the caller's is set."""
    assert jax.sharding.get_abstract_mesh().empty
    assert jax.config.jax_default_matmul_precision is None
    assert jax.config.jax_numpy_rank_promotion == "allow"
    x = jax.random.normal(jax.random.key(0), (1, 128, 2, 64))
    names = "output", "gradient"
    for name, got, expected in zip(
        names, *(_both(i, x) for i in (KERNELS, "reference")), strict=True
    ):
        error = np.abs(got - expected).max() / np.abs(expected).max()
        if error > 1e-3:
            return f"{name} differs by {error:.0e}"
    return None


def _use(monkeypatch, *all_steps):
    """Lets these be all steps that there are."""

    def chosen(**options):
        return [x for x in all_steps if all(getattr(x, name) == y for name, y in options.items())]

    monkeypatch.setattr(prove, "steps", chosen)


def _interpret(chip):
    """Lets the chip compute with the interpreter."""
    chip.device.device_kind = "cpu"  # As meshes of its devices say.
    chip.monkeypatch.setitem(api.IMPLEMENTATIONS, "pallas", KERNELS)
    chip.monkeypatch.setattr(verdicts, "Pallas", lambda: KERNELS)


@pytest.fixture
def interpreted(chip):
    """The chip computes with the interpreter, and a missing verdict is made while tracing."""
    _interpret(chip)
    chip.monkeypatch.setattr(api, "_KERNEL_PAIRS", 128**2)
    float32 = T5._replace(dtype="float32")
    none = _step("forward: no rule", subject=float32._replace(rule_class="none"))
    _use(chip.monkeypatch, none, _step(run=_compare, subject=float32))
    chip.monkeypatch.setattr(verdicts, "check", prove.make)
    return chip


def _scan(x):
    return jax.lax.scan(lambda c, _: (_attend(c), None), x, None, 2)[0]


def _checkpoint(x):
    return jax.grad(lambda x: jax.checkpoint(_attend)(x).sum())(x)


def _grad_of_vmap(x):
    return jax.grad(lambda x: jax.vmap(_attend)(x).sum())(x[None])[0]


def _precision(x):
    with jax.default_matmul_precision("bfloat16"):
        return _attend(x)


def _sharded(x):
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        return _attend(x)


@pytest.mark.parametrize("function", [_scan, _checkpoint, _grad_of_vmap, _precision, _sharded])
def test_a_verdict_is_made_while_a_program_is_traced(interpreted, function):
    x = jax.ShapeDtypeStruct((1, 128, 2, 64), jnp.float32)
    assert "pallas_call" in str(jax.make_jaxpr(function)(x))
    results = {subject.rule_class: verdict[:2] for subject, verdict in verdicts.here()}
    assert results == {"none": (None, 1), "distance": (None, 1)}


def test_a_verdict_is_made_outside_of_programs_and_for_shapes(interpreted):
    x = jax.random.normal(jax.random.key(1), (1, 128, 2, 64))
    expected = _both("reference", x)[0]
    for attend in (jax.jit(_attend), _attend):
        for path in verdicts.folder().glob("*"):
            path.unlink()
        interpreted.restart()
        assert_close(attend(x), expected)
        assert [*verdicts.here()]
    interpreted.restart()
    interpreted.monkeypatch.setattr(verdicts, "check", lambda subject: pytest.fail("made again"))
    assert jax.eval_shape(_attend, x).shape == x.shape


def test_a_fault_of_one_percent_is_not_used(interpreted, caplog):
    """`None` takes what it took before, and says once what is wrong."""
    options = {"dtype": "float32", "head_dim": 64, "interpret": True, "small": True}
    table = steps(family="forward", rule_class="distance", **options)[0]
    _use(interpreted.monkeypatch, _step(subject=Subject("none", "float32", 64)), table)
    of_kernel = forward.finish_softmax

    def faulty(scratch, out_ref, dropout_rate=None):
        lse = of_kernel(scratch, out_ref, dropout_rate)
        out_ref[...] = 1.01 * out_ref[...]
        return lse

    interpreted.monkeypatch.setattr(forward, "finish_softmax", faulty)
    _clear_caches()
    x = jax.random.normal(jax.random.key(1), (1, 128, 2, 64))
    assert_close(jax.jit(_attend)(x), _both("reference", x)[0])
    assert "pallas_call" not in str(jax.make_jaxpr(_attend)(x))
    ((_, fault),) = [s for s in _faults().items() if s[1]]
    assert fault.startswith("forward: table by distance: output: batch 0, head 0, tile row 0, ")
    expected = f"class distance, float32, head dim 64 on cpu: its kernels are wrong ({fault});"
    assert expected in _line(caplog)
    _clear_caches()


def _clear_caches():
    """Forgets the kernels that were traced."""
    jax.clear_caches()
    executable.cache_clear()


def _faults():
    """Returns the faults of the verdicts, by class."""
    return {subject.rule_class: verdict.fault for subject, verdict in verdicts.here()}


def _main(capsys, *arguments):
    """Returns the exit status, the lines of the screen, and the text of errors."""
    try:
        status = program.main([*arguments])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    return status, out.splitlines(), err


def _raise(error):
    raise error


def test_the_program(chip, capsys):
    ran = []
    product = T5._replace(rule_class="product")
    _use(
        chip.monkeypatch,
        _step("backward: T5", lambda: ran.append("T5")),
        _step(
            "rotation of 64 rows", lambda: ran.append("rotation"), Subject("", "", 0), "primitives"
        ),
        _step("forward: Shaw", lambda: "batch 1, head 0, tile (2, 1)", product),
        _step("forward: DeBERTa", lambda: _raise(ValueError("no\n room")), product),
        _step("forward: FIRE", lambda: _raise(NotImplementedError("a network")), product),
        _step("decode: FIRE", lambda: ran.append("decode"), T5._replace(head_dim=128), "decode"),
    )
    status, lines, error = _main(capsys)
    assert status == 1 and not error and ran == ["rotation", "T5", "decode"]
    assert lines[0] == f"TPU v6 lite: 6 steps; verdicts in {verdicts.folder()}"
    assert lines[1].startswith("  1/6 rotation of 64 rows ... right, ")
    assert lines[2].startswith("  2/6 backward: T5 ... right, ")
    assert lines[3:6] == [
        "  3/6 forward: Shaw ... WRONG: batch 1, head 0, tile (2, 1)",
        "  4/6 forward: DeBERTa ... WRONG: ValueError: no room",
        "  5/6 forward: FIRE ... no kernel: a network",
    ]
    assert lines[7:10] == [
        "right: rule class distance, bfloat16, head dim 64",
        "WRONG: rule class product, bfloat16, head dim 64",
        "right: rule class decode, bfloat16, head dim 128",
    ]
    verdict = dict(verdicts.here())[product]
    assert verdict.fault == "forward: Shaw: batch 1, head 0, tile (2, 1)" and verdict.steps == 3
    status, lines, _ = _main(capsys, "--rule-class", "decode", "--dtype", "bfloat16")
    assert status == 0 and len(lines) == 4
    with jax.numpy_dtype_promotion("standard"):
        facts()
    lines = capsys.readouterr().out.splitlines()
    day = time.strftime("%Y-%m-%d", time.gmtime(verdict.time))
    assert [line.strip() for line in lines[-3:]] == [
        f"rule class decode, bfloat16, head dim 128: right (2 steps, {day})",
        f"rule class distance, bfloat16, head dim 64: right (2 steps, {day})",
        "rule class product, bfloat16, head dim 64: wrong: forward: Shaw: batch 1, head 0, "
        f"tile (2, 1) (3 steps, {day})",
    ]


def test_a_chip_that_no_longer_answers(chip, capsys):
    """The step that did not return is wrong, and the others are not tried."""
    hang = threading.Event()
    _use(
        chip.monkeypatch,
        _step("forward: T5"),
        _step("forward: Shaw", hang.wait, T5._replace(rule_class="product")),
        _step("forward: FoX", lambda: pytest.fail(), T5._replace(rule_class="separable")),
    )
    status, lines, _ = _main(capsys, "--seconds", "1")
    hang.set()
    assert status == 1 and lines[-2].startswith("The chip no longer answers")
    assert _faults() == {"distance": None, "product": "forward: Shaw: no result in 1 s"}

    chip.monkeypatch.setattr(prove, "_answers", lambda: False)
    _use(chip.monkeypatch, _step("forward: T5", lambda: _raise(RuntimeError("illegal address"))))
    with pytest.raises(prove.ChipLostError, match=r"forward: T5: RuntimeError: illegal address"):
        prove.make(T5)
    assert _faults()["distance"] == "forward: T5: RuntimeError: illegal address"


def test_a_fault_of_an_operation_is_in_every_verdict(chip, capsys):
    operation = Subject("", "", 0)
    _use(
        chip.monkeypatch,
        _step("forward: T5"),
        _step("rotation of 64 rows", lambda: "row 3", operation, "primitives"),
    )
    assert _main(capsys)[0] == 1
    assert prove.make(T5).fault == "rotation of 64 rows: row 3"
    assert _faults() == {"distance": "rotation of 64 rows: row 3"}


def test_wrong_calls_and_machines_without_a_chip(capsys, monkeypatch, tmp_path):
    _use(monkeypatch, _step("forward: T5"))
    status, _, error = _main(capsys, "--rule-class", "distanc")
    assert status == 2 and "there is no step of rule class distanc;" in error
    status, _, error = _main(capsys)
    assert status == 2 and error.startswith("error: there are kernels for TPUs and NVIDIA GPUs")
    status, lines, _ = _main(capsys, "--list")
    assert status == 0 and lines[-1] == "  forward: T5"
    for arguments in (["--head-dim", "0"], ["--dtype", "bf16"], ["--device", "tpu"]):
        assert _main(capsys, *arguments)[0] == 2


def test_a_folder_that_cannot_be_written(chip, capsys, tmp_path):
    (tmp_path / "file").touch()
    chip.monkeypatch.setenv(verdicts.FOLDER, str(tmp_path / "file" / "folder"))
    _use(chip.monkeypatch, _step("forward: T5", lambda: pytest.fail("ran")))
    status, _, error = _main(capsys)
    assert status == 2 and error.startswith("error: verdicts cannot be written")
    chip.monkeypatch.setattr(verdicts, "check", lambda subject: RIGHT)
    assert _t5() == "pallas"  # In this process.


def test_the_setting_of_the_environment():
    code = """
import os
os.environ["POSENC_JAX_PROVE"] = "yes"
try:
    import posenc_jax
except ValueError as error:
    print(error)
os.environ["POSENC_JAX_PROVE"] = "1"
import posenc_jax
print(posenc_jax._verdicts.check.__name__)
"""
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert out.stdout == "posenc_jax: POSENC_JAX_PROVE must be 0 or 1, got 'yes'.\nmake\n"


def test_rule_classes_are_those_of_the_steps():
    random = np.random.default_rng(0)
    for name, case in RULES.items():
        rules = case.rules(case.make(random, Case(name, name)))
        classes = {verdicts.rule_class(rule, by_slot=True) for rule in rules} or {"none"}
        assert classes == {case.rule_class}, name


def test_gpus(chip, caplog):
    """cuDNN comes first, then these kernels from a block of queries on."""
    chip.monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    chip.device.compute_capability = "8.0"
    for name, lacks in (("pallas", lambda problem: None), ("cudnn", lambda problem: problem.rules)):
        served = types.SimpleNamespace(name=name, supports=lambda p, lacks=lacks: lacks(p) or None)
        chip.monkeypatch.setitem(api.IMPLEMENTATIONS, name, served)
    assert _t5(platform="gpu") == "xla" and not caplog.records  # There are no kernels.
    chip.monkeypatch.setattr(verdicts, "Pallas", lambda: KERNELS)
    chip.restart()
    assert _t5(platform="gpu") == "xla" and "no verdict" in _line(caplog)
    _write()
    chip.restart()
    assert _t5(platform="gpu") == "pallas" and _chosen(platform="gpu") == "cudnn"
    few = {"q_positions": jnp.arange(64), "k_positions": jnp.arange(2**13)}
    assert (
        _chosen(pe.ALiBi(num_heads=2).rules({}), length=64, keys=2**13, platform="gpu", **few)
        == "xla"
    )
