"""The chips on which `None` takes the kernels, and the program that checks them.

`jax.local_devices` names a chip that is not there, as far as choices ask.
"""

import dataclasses
import hashlib
import json
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import posenc_jax as pe
from posenc_jax.engine import api, chips
from posenc_jax.engine.pallas import Pallas
from posenc_jax.engine.problem import platform_of
from posenc_jax.engine.rule import as_tuple
from posenc_jax.kernels import __main__ as program
from posenc_jax.kernels.checks import steps
from posenc_jax.kernels.checks.runner import DeviceError
from posenc_jax.kernels.gpu.implementation import COMPILED
from tests.kernels.kernel_cases import described
from tests.support import gpu_lowered, slow
from tests.testing.test_user_schemes import PerPair

WARN_OF_TILES = chips.warn_of_tiles
H100 = chips.Chip("NVIDIA H100 80GB HBM3", "0.11.2", "cuda 13000", ("bfloat16",), "", "")


@pytest.fixture
def chip(monkeypatch):
    """A chip of the table, with its versions."""
    monkeypatch.setattr(chips, "CHIPS", (H100,))
    client = types.SimpleNamespace(platform_version=H100.runtime)
    device = types.SimpleNamespace(platform="gpu", device_kind=H100.device_kind, client=client)
    device.compute_capability = "9.0"
    monkeypatch.setattr(jax, "local_devices", lambda **_: [device])
    monkeypatch.setattr(jax, "default_backend", lambda: device.platform)
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    monkeypatch.setattr(chips, "warn_of_tiles", lambda *_: None)
    _set_versions(monkeypatch, H100.jax)
    return device


def _set_versions(monkeypatch, version):
    for module in (jax, jaxlib):
        monkeypatch.setattr(module, "__version__", version)


@pytest.fixture
def warning_chip(chip, monkeypatch):
    """The chip, in a process in which nobody was warned."""
    monkeypatch.setattr(chips, "warn_of_tiles", WARN_OF_TILES)
    monkeypatch.setattr(chips, "_warned", set())
    return chip


def _chosen(*rules, length=512, keys=None, dim=64, value_dim=None, dtype=jnp.bfloat16, **options):
    """Returns the word of the implementation that `None` takes for [1, length, 2, dim]."""
    words, sharding = [], options.pop("sharding", None)

    def ask(q):
        k = jnp.zeros((1, keys or length, 2, dim), dtype)
        v = jnp.zeros((1, keys or length, 2, value_dim or dim), dtype)
        call = pe.AttentionCall(**{"is_causal": True} | options)
        problem = api.make_problem(q, k, v, as_tuple(rules), call)
        problem = dataclasses.replace(problem, needs_lse=call.return_lse)
        words.append(api.choose(problem).name)

    jax.eval_shape(ask, jax.ShapeDtypeStruct((1, length, 2, dim), dtype, sharding=sharding))
    return words[0]


PACKED = {"q_segment_ids": jnp.zeros((1, 512), jnp.int32)}
TABLE = np.random.default_rng(0).normal(size=(2, 32)).astype(np.float32)
T5 = pe.T5(num_heads=2).rules({"table": TABLE})
ALIBI = pe.ALiBi(num_heads=2).rules({})
FOX = pe.SeparableBias(q_features=jnp.zeros((1, 512, 2)), k_features=jnp.zeros((1, 512, 2)))


def _places(length, keys):
    at = jnp.arange(keys)
    return {"q_positions": at[keys - length :], "k_positions": at, "length": length, "keys": keys}


@gpu_lowered
def test_what_none_takes_on_a_chip_of_the_table(chip):
    """cuDNN where it serves the call; rules, and calls that it lacks, by the kernels."""
    assert _chosen() == _chosen(window=64) == "cudnn"
    for rules in (T5, ALIBI, FOX, (T5, FOX)):
        assert _chosen(*as_tuple(rules)) == "pallas", rules
    for options in (
        PACKED,
        {"window": (64, 2), "is_causal": False},
        {"softcap": 3.0},
        {"sinks": jnp.zeros(2)},
        {"return_lse": True},
        _places(128, 2**12),
    ):
        assert _chosen(**options) == "pallas", options
    for options in (
        {"dtype": jnp.float16},  # No step has run.
        {"dtype": jnp.float32},
        {"value_dim": 32},  # No step has run.
        {"length": 256},  # Nothing was timed.
        {"dropout_rate": 0.1, "dropout_key": jax.random.key(0)},
        {"mask": jnp.ones((1, 1, 512, 512), bool)},
    ):
        assert _chosen(T5, **options) == "xla", options
    # A step of decoding takes a third of the kernel's time in whole rows.
    assert _chosen(ALIBI, **_places(1, 2**18)) == "dense"
    assert _chosen(ALIBI, **_places(16, 2**14)) == _chosen(ALIBI, **_places(64, 2**13)) == "xla"


@gpu_lowered
@pytest.mark.parametrize(
    ("kind", "version"), [("NVIDIA H200", "0.11.2"), ("NVIDIA H100 80GB HBM3", "0.12.0.1")]
)
def test_none_warns_once_where_kernels_were_not_checked(warning_chip, monkeypatch, kind, version):
    warning_chip.device_kind = kind
    _set_versions(monkeypatch, version)
    # Warnings are errors in tests.
    assert _chosen() == "cudnn"
    assert _chosen(ALIBI, length=256) == "xla"
    assert _chosen(ALIBI, **_places(1, 2**18)) == "dense"
    assert _chosen(T5, mask=jnp.ones((1, 1, 512, 512), bool)) == "xla"  # No kernel serves it.
    warning_chip.compute_capability = "8.0"
    assert _chosen(T5) == "xla"
    warning_chip.compute_capability = "9.0"
    message = (
        f'None takes "xla" .* in bfloat16 on {kind} with jax {re.escape(version)}, cuda 13000: .* '
        r"checked on NVIDIA H100 80GB HBM3 with jax 0\.11\.2, cuda 13000 \(bfloat16\)\. "
    )
    with pytest.warns(UserWarning, match=message):
        assert _chosen(T5) == "xla"
    assert _chosen(T5) == _chosen(**PACKED) == "xla"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sloped(PerPair):
    """A rule of one's own, with an array by another name."""

    slope: jax.Array | None = None

    def logit(self, q, k):
        return self.slope * super().logit(q, k)


SLOPED = Sloped(jnp.ones(2), jnp.float32(0.1))


@gpu_lowered
def test_rules_with_other_fields_are_computed_on_chips_too(chip):
    assert _chosen(SLOPED) == "pallas"


@pytest.mark.parametrize("rule", [T5, SLOPED])
def test_none_warns_on_tpus_too(warning_chip, rule):
    warning_chip.platform, warning_chip.device_kind = "tpu", "TPU v4"
    assert _chosen() == "splash" and _chosen(rule) == "xla"  # No kernel is for this chip.
    warning_chip.device_kind = "TPU v5e"
    assert _chosen() == "splash" and _chosen(rule, length=256) == "xla"
    with pytest.warns(UserWarning, match=r"on TPU v5e with .* not been timed on TPUs: time both"):
        assert _chosen(rule) == "xla"
    assert _chosen(rule) == "xla"


def test_versions_with_which_nobody_compiled_the_kernels_are_refused(warning_chip, monkeypatch):
    _set_versions(monkeypatch, "0.13.1")
    monkeypatch.setattr(jax, "__version_info__", (0, 13, 1))
    pattern = r"nobody compiled the kernels with jax 0\.13\.1.*Pallas\(any_version=True\)"
    assert re.match(pattern, Pallas().platform_refusal("gpu"))
    assert Pallas(any_version=True).platform_refusal("gpu") is None
    with pytest.warns(UserWarning, match=r"=\(engine\.pallas\.Pallas\(any_version=True\), None\)"):
        assert _chosen(T5) == "xla"


def test_versions_that_were_compiled_have_reports():
    """Those of `python -m tests.makers kernels_compiled h100`."""
    reports = json.loads((pathlib.Path(__file__).parent / "spilled.json").read_text())
    versions = {tuple(map(int, version.split(".")[:2])) for version in reports}
    assert versions == set(COMPILED)


_PAGE = pathlib.Path(__file__).parents[2] / "docs" / "which_gpu.md"
_KINDS = {
    "H100 80GB HBM3 with": ("gpu", "NVIDIA H100 80GB HBM3", "9.0", "0.11.2", "cuda 13000"),
    "H100 with other": ("gpu", "NVIDIA H100 80GB HBM3", "9.0", "0.12.0.1", "cuda 13000"),
    "H200": ("gpu", "NVIDIA H200", "9.0", "0.11.2", "cuda 13000"),
    "B200": ("gpu", "NVIDIA B200", "10.0", "0.11.2", "cuda 13000"),
    "A100": ("gpu", "NVIDIA A100-SXM4-40GB", "8.0", "0.11.2", "cuda 13000"),
    "L4": ("gpu", "NVIDIA L4", "8.9", "0.11.2", "cuda 13000"),
    "RTX 50": ("gpu", "NVIDIA GeForce RTX 5090", "12.0", "0.11.2", "cuda 13000"),
    "T4": ("gpu", "Tesla T4", "7.5", "0.11.2", "cuda 13000"),
    "AMD": ("gpu", "AMD Instinct MI300X", "gfx942", "0.11.2", "rocm 70000"),
    "TPU v5e": ("tpu", "TPU v5e", None, "0.11.2", "libtpu"),
    "TPU v4": ("tpu", "TPU v4", None, "0.11.2", "libtpu"),
}


@gpu_lowered
@pytest.mark.parametrize("name", _KINDS)
def test_the_page_says_what_none_takes(chip, monkeypatch, name):
    chip.platform, chip.device_kind, chip.compute_capability, version, runtime = _KINDS[name]
    chip.client = types.SimpleNamespace(platform_version=runtime)
    _set_versions(monkeypatch, version)
    (row,) = [x for x in _PAGE.read_text().splitlines() if x.startswith(f"| {name}")]
    taken = _chosen(), _chosen(**PACKED), _chosen(T5), _chosen(FOX)
    assert [x.strip() for x in row.split("|")[2:6]] == [f'"{word}"' for word in taken]
    for rule, word in ((T5, taken[2]), (FOX, taken[3])):
        assert _chosen(rule, **PACKED) == word


@slow
@gpu_lowered
def test_packed_and_padded_rows_take_what_whole_ones_take(chip, monkeypatch):
    """By segment_ids alone, with positions of a helper, known or traced."""
    words, choose, helper = [], api.choose, pe.positions.from_segment_ids

    class Zeros(api.Implementation):
        """Has the results' shapes, and takes no time to trace."""

        name = "zeros"

        def __call__(self, p):
            return jnp.zeros((*p.q.shape[:3], p.v.shape[3]), p.q.dtype), jnp.zeros(p.q.shape[:3])

    def record(problem):
        words.append(choose(problem).name)
        return Zeros()

    monkeypatch.setattr(api, "choose", record)
    packed, padded = np.zeros((2, 2, 512), np.int32)
    packed[:, 200:], padded[:, 500:] = 1, -1
    sizes = {"num_heads": 2, "num_kv_heads": 2, "head_dim": 64, "model_dim": 16}
    sizes |= dict.fromkeys(("max_length", "trained_length"), 512)
    q, x = (jax.ShapeDtypeStruct((2, 512, *size), jnp.bfloat16) for size in ((2, 64), (16,)))

    def taken(scheme, ids=None, positions=None, is_traced=False):
        params = jax.eval_shape(scheme.init, jax.random.key(0))

        def attend(params, q, x, ids):
            at = positions and positions(ids)
            options = {"segment_ids": ids, "positions": at, "is_causal": True, "x": x}
            return pe.scheme_attention(scheme, params, q, q, q, **options)[0]

        if not is_traced:
            known, attend = ids, lambda *args, attend=attend: attend(*args[:3], known)
        words.clear()
        jax.eval_shape(attend, params, q, x, ids)
        return [*words]

    for cls in pe.SCHEMES.values():
        fields = {field.name for field in dataclasses.fields(cls)}
        scheme = cls(**{name: size for name, size in sizes.items() if name in fields})
        # cuDNN has no segments.
        whole = [word.replace("cudnn", "pallas") for word in taken(scheme)]
        for ids, *how in ((packed, None, True), (padded, None, False), (packed, helper, True)):
            assert taken(scheme, ids, *how) == whole, (scheme, how)
    for ids, is_traced in ((padded, True), (packed, False)):
        assert taken(pe.T5(2), ids, helper, is_traced) == ["pallas"]
    assert taken(pe.T5(2), packed, is_traced=True) == ["pallas"]


@gpu_lowered
@pytest.mark.parametrize(
    "change",
    [
        lambda monkeypatch, chip: setattr(chip, "device_kind", "NVIDIA H200"),
        lambda monkeypatch, chip: setattr(chip.client, "platform_version", "cuda 12090"),
        lambda monkeypatch, chip: monkeypatch.setattr(jax, "__version__", "0.12.0"),
        lambda monkeypatch, chip: monkeypatch.setattr(jaxlib, "__version__", "0.11.1"),
        lambda monkeypatch, chip: monkeypatch.setattr(chips, "CHIPS", ()),
    ],
    ids=["kind", "CUDA", "jax", "jaxlib", "no row"],
)
def test_other_chips_and_versions_wait_for_a_run(chip, monkeypatch, change):
    assert _chosen(T5) == "pallas"
    change(monkeypatch, chip)
    assert _chosen(T5) == "xla" and _chosen() == "cudnn"


def test_tpus_wait_for_a_run(chip, monkeypatch):
    chip.platform, chip.device_kind = "tpu", "TPU v6 lite"
    decode = _places(1, 2**18)
    assert (_chosen(T5), _chosen(), _chosen(ALIBI, **decode)) == ("xla", "splash", "dense")
    row = H100._replace(device_kind=chip.device_kind)
    with monkeypatch.context() as patch:
        patch.setattr(chips, "CHIPS", (row,))
        assert (_chosen(T5), _chosen(), _chosen(ALIBI, **decode)) == ("pallas", "splash", "dense")


def test_none_takes_splash_on_tpus_where_it_serves(chip):
    chip.platform, chip.device_kind = "tpu", "TPU v5 lite"
    short = {"is_causal": False, "keys": 128}
    for options in ({"is_causal": False}, {"window": 64}, {"softcap": 3.0, **PACKED}):
        assert _chosen(**options) == "splash"
    assert _chosen(**short) == "xla" and _chosen(length=1) == "dense"
    assert _chosen(**short | {"length": 1024, "keys": 256}) == "splash"
    for options in ({"return_lse": True}, {"dim": 320}, {"dtype": jnp.float16}, _places(512, 600)):
        assert _chosen(**options) == "xla", options
    for kind in ("TPU v3", "TPU v4", "TPU v5", "TPU v6 lite", "TPU7x"):
        chip.device_kind = kind
        assert _chosen() == ("xla" if kind == "TPU v3" else "splash")


def test_rotary_schemes_take_splash(chip):
    chip.platform, chip.device_kind = "tpu", "TPU v5 lite"
    q = jax.ShapeDtypeStruct((1, 512, 2, 32), jnp.bfloat16)
    options = {"is_causal": True, "segment_ids": np.zeros((1, 512), np.int32)}

    def attend(q):
        return pe.scheme_attention(pe.RoPE(32), {}, q, q, q, **options)[0]

    assert "splash_mha" in str(jax.make_jaxpr(attend)(q))


def test_none_takes_splash_where_the_devices_are_known(chip, monkeypatch):
    """The compiler cannot partition a kernel, and `in_shardings` of `jit` are unknown to traces."""
    chip.platform = "tpu"
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    monkeypatch.setattr("posenc_jax.kernels.tpu.chip.device_kind", lambda: "TPU v5 lite")
    assert _chosen() == "xla"
    for kind, axes, word in (
        (AxisType.Explicit, (), "splash"),
        (AxisType.Explicit, (None, None, "data"), "splash"),
        (AxisType.Explicit, (None, "data"), "xla"),  # The sequence.
        (AxisType.Auto, (), "xla"),
    ):
        mesh = jax.make_mesh((2, 4), ("data", "heads"), axis_types=(kind,) * 2)
        assert _chosen(sharding=NamedSharding(mesh, PartitionSpec(*axes))) == word, axes


def test_programs_of_another_device_take_its_default(chip):
    chip.platform, chip.device_kind = "tpu", "TPU v5 lite"
    q, cpu = jnp.zeros((1, 512, 2, 64)), jax.devices("cpu")[0]
    committed = jax.device_put(q, cpu).astype(jnp.bfloat16)
    assert platform_of(q) == platform_of(np.zeros(q.shape)) == "tpu"
    problem = api.make_problem(*[committed] * 3, (), pe.AttentionCall(is_causal=True))
    problem = dataclasses.replace(problem, needs_lse=False)
    for word in ("pallas", "splash", "cudnn"):  # Whatever the default is.
        assert api.IMPLEMENTATIONS[word].refusal(problem).endswith("the platform is cpu")

    def has_a_kernel():
        return "pallas_call" in str(jax.make_jaxpr(lambda q: pe.attention(q, q, q))(q))

    for device in ("cpu", cpu):
        with jax.default_device(device):
            assert not has_a_kernel()
    assert has_a_kernel()


@gpu_lowered
def test_chips_that_are_described_and_devices_that_a_trace_does_not_show(chip, monkeypatch):
    for kind, word in (("NVIDIA H200", "xla"), (H100.device_kind, "pallas")):
        with described(kind):
            assert _chosen(T5) == word
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    assert _chosen(T5) == "xla"


@gpu_lowered
def test_new_masks_were_in_no_step_of_the_row(chip):
    assert _chosen(T5) == "pallas"
    assert _chosen(T5, k_visible_until=np.arange(1, 513)) == "xla"
    window, at = pe.SlidingWindow(9, by="coordinates"), np.arange(512)
    assert _chosen(window=window, q_positions=at // 8, q_coordinates=at) == "xla"
    assert _chosen(mask=pe.block_mask(lambda b, h, i, j: i > j, 512, 512)) == "xla"


@gpu_lowered
def test_sharded_arrays(chip, monkeypatch):
    """What cannot be divided over the devices keeps what it took before."""
    chip.device_kind = "cpu"  # As meshes of its devices say.
    monkeypatch.setattr(chips, "CHIPS", [H100._replace(device_kind="cpu")])
    for axes, word in (
        ((), "pallas"),
        ((None, None, "heads"), "pallas"),
        ((None, "data"), "xla"),
        ((None, None, None, "data"), "xla"),
    ):
        mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Explicit,) * 2)
        assert _chosen(T5, sharding=NamedSharding(mesh, PartitionSpec(*axes))) == word, axes


RESULTS = pathlib.Path(__file__).parents[2] / "results" / "gpu"
ABOUT = {"jax": H100.jax, "jaxlib": H100.jax, "runtime": H100.runtime, "kernels": program.FIT}
ABOUT |= {"device": f"gpu: {H100.device_kind}"}


def _rows():
    """Returns the outcomes of the committed run."""
    return [json.loads(x) for x in RESULTS.joinpath("steps.jsonl").read_text().splitlines()]


def test_the_committed_run_gives_the_row():
    about = json.loads(RESULTS.joinpath("machine.json").read_text())
    chip = program.chip_of(about, program.passed(_rows()))
    assert chip is not None and chips.CHIPS[0][:4] == chip[:4]
    assert chips.CHIPS[0][4:] == (about["date"], about["commit"])
    # The run had decode steps, too, and none of these: see `chips.are_default`.
    new = ("branches", "images", "blocks")
    names = {x.name for x in steps.steps() if not any(getattr(x.case, n) for n in new)}
    ran = {row["step"] for row in _rows() if row["implementation"] == "pallas"}
    assert {name for name in ran if not name.startswith("decode: ")} == names


def test_the_row_is_of_the_kernels_as_they_are():
    """Of all files that make the programs. If these changed, remove the row.

    If files did and no program (`python -m tests.makers kernel_programs`), take the new digest.
    """
    package = pathlib.Path(pe.__file__).parent
    engine = "blocks dropout lower mask mesh problem rule rules simplified tables tokens toeplitz"
    files = [package / "engine" / f"{name}.py" for name in (*engine.split(), "tracing")]
    files += [package / "kernels" / f"{name}.py" for name in ("base", "elements", "operands")]
    files += sorted(package.glob("kernels/gpu/*.py"))
    digest = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    assert not chips.CHIPS or digest[:12] == "4cd3b67fb964"


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: rows[0].update(outcome="wrong"),
        lambda rows: rows[0].update(outcome="skipped"),
        lambda rows: [row.update(family="forward") for row in rows],
        lambda rows: [row.update(outcome="refused") for row in rows],
    ],
    ids=["wrong", "skipped", "a family is missing", "refused"],
)
def test_there_is_no_row_unless_all_steps_passed(change):
    rows = _rows()
    assert program.passed(rows) == ("bfloat16",)
    change(rows)
    assert program.passed(rows) == ()
    for other in ({"kernels": "the platform is cpu"}, {"jaxlib": "0.11.1"}):
        assert program.chip_of(ABOUT | other, ("bfloat16",)) is None


@slow
def test_the_program(monkeypatch, tmp_path, capsys):
    rows, about, log = _rows(), {**ABOUT}, f"--log={tmp_path / 'log'}"
    monkeypatch.setattr(program.Runner, "machine", lambda self: about)
    monkeypatch.setattr(program.Runner, "run", lambda self, platform: rows)
    assert program.main([log]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    path, text = last.split(": ", 1)
    assert path.endswith("engine/chips.py") and text.startswith(f"Chip(device_kind={H100[0]!r}")
    rows[0]["outcome"] = "hang"
    assert program.main([log]) == 1
    assert capsys.readouterr().out.endswith("Not all steps of the kernels ran and were right.\n")
    about["kernels"] = "the platform is cpu"
    assert program.main([log]) == 2 and capsys.readouterr().err == "error: the platform is cpu\n"

    def raises(self):
        raise DeviceError("the device does not start: no message")

    monkeypatch.setattr(program.Runner, "machine", raises)
    assert program.main([log]) == 2 and "does not start" in capsys.readouterr().err
    monkeypatch.undo()
    (tmp_path / "file").touch()
    for log, message in (
        (
            tmp_path / "log",
            "error: there are kernels for TPUs and NVIDIA GPUs, and the platform is",
        ),
        (tmp_path / "file" / "log", "error: [Errno"),
    ):
        assert program.main([f"--log={log}"]) == 2
        assert capsys.readouterr().err.startswith(message)
