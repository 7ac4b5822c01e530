"""Settings: errors are one line with status 2, before anything is written."""

import csv
import pathlib
import tomllib

import pytest
import tomli_w

from experiments.__main__ import main
from experiments.errors import ConfigError
from experiments.models.schemes import has_table
from experiments.runs.experiment import Experiment, from_file, load

MINE = "experiments_mine:Parity"


@pytest.fixture(autouse=True)
def own_module(monkeypatch):
    """Makes tests/experiments/mine.py importable under a name that clashes with nothing."""
    import importlib.util
    import sys

    spec = importlib.util.spec_from_file_location(
        "experiments_mine", pathlib.Path(__file__).with_name("mine.py")
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "experiments_mine", module)
    spec.loader.exec_module(module)


@pytest.fixture
def file(tmp_path):
    def write(text=""):
        path = tmp_path / "a.toml"
        path.write_text(text)
        return path

    return write


# Defaults that hold for t5 too, whose furthest distance must occur in training.
T5 = "[schemes.t5]\nmax_distance = 32\n"

IN_FILE = {
    "kback.train.learning_rate: must be a valid number, got '1e-3'": (
        "[kback.train]\nlearning_rate = '1e-3'"
    ),
    "kback.test_lengths[1]: must be a valid integer, got 'x'": "[kback]\ntest_lengths = [32, 'x']",
    "schemes.t5.max_distence: unknown option of T5; did you mean 'max_distance'?": (
        "[schemes.t5]\nmax_distence = 3"
    ),
    "schemes.none.theta: unknown option of NoPE; known: none": (
        "[schemes]\nnames = ['none']\n[schemes.none]\ntheta = 3"
    ),
    "schemes: unknown scheme 'ropee'; did you mean 'rope'?": "[schemes]\nnames = ['ropee']",
    "schemes.rope.head_dim: 8, but the model of task kback has 16": (
        "[schemes]\nnames = ['rope']\n[schemes.rope]\nhead_dim = 8"
    ),
    "text.rates: there is no scheme 'ropee'; did you mean 'rope'?": (
        "[text.rates]\nropee = {learning_rate = 1e-3}"
    ),
    "text.rates.rope.learning_rate: must be greater than 0, got -1.0": (
        "[text.rates.rope]\nlearning_rate = -1.0"
    ),
    "cannot be read": "seeds = = 1",
    "is nested too deeply": "seeds = " + "[" * 3000 + "]" * 3000,
    "a.toml: a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a: is nested too deeply": (
        ".".join(["a"] * 5000) + " = 1"
    ),
    "a.toml: schemes.learned.stddev: must be a finite number, got inf": (
        "[schemes]\nnames = ['learned']\n[schemes.learned]\nstddev = inf"
    ),
    "a.toml: kback.train.steps: must be below 2**31, got 1329 bits": (
        "[kback.train]\nsteps = 1" + 400 * "0"
    ),
    "kback.train.steps: must be less than or equal to 100000000": (
        "[kback.train]\nsteps = 1000000000"
    ),
    "kback.test_lengths[1]: must be below 2**31": "[kback]\ntest_lengths = [32, 10000000000]",
    r"name: must be the name of a folder, got 'a\x00b'": r'name = "a\u0000b"',
    "schemes: 'os' is of an installed package or of Python's library": (
        "[schemes]\nnames = ['os:system']\n[schemes.'os:system']\ncommand = 'touch called'"
    ),
}


@pytest.mark.parametrize(("message", "text"), IN_FILE.items())
def test_invalid_file_is_one_line(file, message, text):
    with pytest.raises(ConfigError) as error:
        load(file(text))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


ON_THE_COMMAND_LINE = {
    "kback.model.d_modle: unknown setting of Model; did you mean 'model_dim'?": (
        "--kback.model.d-modle=3"
    ),
    "sedes: unknown setting of Experiment; did you mean 'seeds'?": "--sedes 3",
    "seeds: must be a valid integer, got 'two'": "--seeds two",
    "kback.train.learning_rate: must be a finite number, got inf": (
        "--kback.train.learning-rate inf"
    ),
    "name: must be the name of a folder, got '..'": "--name ..",
    "tasks: unknown task 'kbak'; did you mean 'kback'?": "--tasks kbak",
    "kback.train.steps: must be greater than 0, got 0": "--kback.train.steps 0",
    "kback.train.steps: must be a multiple of kback.train.steps_per_call = 25 and more than "
    "kback.train.warmup = 50, got 50; the nearest is 75": "--kback.train.steps 50",
    "= 50, got 310; the nearest is 300": "--kback.train.steps 310",
    "= 50, got 80; the nearest is 90": "--kback.train.steps 80 --kback.train.steps-per-call 30",
    "kback.model.model_dim: 63 is not divisible by kback.model.num_heads = 4": (
        "--kback.model.model-dim 63"
    ),
    "schemes.rope: task kback: rope: rotary dim must be even and positive, got 5": (
        "--kback.model.model-dim 20"
    ),
    "schemes.t5.max_distance: 64 exceeds kback.train_length = 32": "--schemes.t5.max-distance 64",
    "kback.test_lengths: begins with 16, shorter than the training length 32": (
        "--kback.test-lengths 16,32"
    ),
    "kback.offset: 31 leaves no query in": "--kback.offset 31",
    "kback.coordinates: must be 'positions', 'shifted', 'randomized' or 'random_floats', got 'x'": (
        "--kback.coordinates x"
    ),
    "text.corpus: must be the name of a corpus or a path, got": "--tasks text --text.corpus=",
    "text.test_lengths: 200 does not divide the longest": (
        "--tasks text --text.test-lengths 128,200,1024"
    ),
    "text.stride: 33 does not divide": "--tasks text --text.stride 33",
    "text.sliding_lengths: 16 is not among text.test_lengths [128, 256, 512, 1024], and not from": (
        "--tasks text --text.sliding-lengths 16"
    ),
    "text.ngram: no 6-gram repeats within text.sliding_lengths [4]": (
        "--tasks text --text.stride 4 --text.ngram 6 --text.sliding-lengths 4,128"
    ),
    "text.variants: unknown variant 'nkt'; did you mean 'ntk'?": "--tasks text --text.variants nkt",
    "kth.shortest: 31 symbols do not fit": "--tasks kth --kth.shortest 31",
    "schemes: cannot import 'no_such_module'": "--schemes no_such_module:A",
    "has no 'Parite'; did you mean 'Parity'?": "--schemes experiments_mine:Parite",
    "must be a Scheme or a subclass of it, a tuple of layers, or a function": (
        "--schemes experiments_mine:NoScheme"
    ),
    f"schemes.{MINE}.strenght: unknown option of Parity; did you mean 'strength'?": (
        f"--schemes {MINE} --schemes.{MINE}.strenght 3"
    ),
    "schemes.experiments_mine:Unhashable: unhashable type: 'list'": (
        "--schemes experiments_mine:Unhashable"
    ),
    "overrides none of embed, mix, query, key, value, rules, attend and output": (
        "--schemes experiments_mine:Misspelt"
    ),
    "needs a Scheme or a tuple of layers, got None": "--schemes experiments_mine:nothing",
    "schemes.experiments_mine:raises: task kback: RuntimeError: no scheme": (
        "--schemes experiments_mine:raises"
    ),
    "schemes.experiments_mine:exits: task kback: SystemExit: 3": "--schemes experiments_mine:exits",
    "a function annotated to return one (-> pe.Scheme), got <function unannotated": (
        "--schemes experiments_mine:unannotated"
    ),
    "is nested too deeply": f"--{'a.' * 3000}a 1",
    "argument --minutes: must be a number from 0 on, got 'nan'": "--minutes nan",
    "argument --minutes: must be a number from 0 on, got '-1'": "--minutes=-1",
    f"schemes: must name some, each once, got ['rope+{MINE}', 'rope+{MINE}']": (
        f"--schemes rope+{MINE},rope+{MINE}"
    ),
    f"schemes: {MINE} and mine:Parity would both be 'Parity' in tables": (
        f"--schemes {MINE},mine:Parity"
    ),
    "the pattern must have from 1 to 2 layers, got 9": "--schemes experiments_mine:long_pattern",
    "schemes.experiments_mine:both.theta: experiments_mine:both is an object": (
        "--schemes experiments_mine:both --schemes.experiments_mine:both.theta 3"
    ),
    "chain:": "--schemes shaw+shaw",
    "tasks: 'experiments_mine:Parity' is no subclass of Task": f"--tasks {MINE}",
    "tasks: 'experiments_mine:Unfinished' must define fill, most, vocab_size": (
        "--tasks experiments_mine:Unfinished"
    ),
    "tasks: 'experiments_mine:Options' must have a name that is a word, and no setting": (
        "--tasks experiments_mine:Options"
    ),
    "tasks: two have one name": "--tasks kback,experiments.tasks:KBack",
    "has no table [quick], which --quick needs": "--quick",
}


def test_a_quick_table_is_a_table(file):
    with pytest.raises(ConfigError, match="quick: must be a table, got True"):
        load(file("quick = true"), quick=True)


@pytest.mark.parametrize(("message", "arguments"), ON_THE_COMMAND_LINE.items())
def test_invalid_command_line_is_one_line_and_writes_nothing(
    file, tmp_path, capsys, message, arguments
):
    results = tmp_path / "results"
    path = file(T5 + "[text.schemes.t5]\nmax_distance = 128\n")
    tasks = [] if "--tasks" in arguments else ["--tasks", "kback"]
    command = ["compare", str(path), "--results", str(results), *tasks, *arguments.split()]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert message in err
    assert err.startswith("config error: ") and err.count("\n") == 1 and out == ""
    assert not results.exists() and not pathlib.Path("called").exists()


def test_missing_file_and_unknown_command(capsys):
    assert main(["compare", "none.toml"]) == 2
    assert capsys.readouterr().err == "config error: none.toml: no such file\n"
    assert main(["compair"]) == 2
    assert "did you mean 'compare'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "err"),
    [
        (PermissionError(13, "Denied", "a.toml"), 2, "error: [Errno 13] Denied: 'a.toml'\n"),
        (BrokenPipeError(), 141, ""),
    ],
)
def test_errors_of_files_and_pipes_are_no_traceback(monkeypatch, capsys, error, status, err):
    def refuse(*_, **__):
        raise error

    monkeypatch.setattr("experiments.commands.compare.load", refuse)
    monkeypatch.setattr("os.dup2", lambda *_: None)  # Else pytest has no output either.
    assert main(["compare"]) == status
    assert capsys.readouterr().err == err


def test_command_line_overrides_the_file(file):
    path = file(T5 + "num_buckets = 24\n[kback]\noffset = 3\n[kback.train]\nbatch = 7\n")
    changes = ["--tasks=kback", "--kback.train.batch", "9", "--schemes.t5.num-buckets", "16"]
    experiment = load(path, changes)
    assert experiment.tasks["kback"].offset == 3 and experiment.tasks["kback"].train.batch == 9
    assert experiment.scheme("kback", "t5").num_buckets == 16
    assert experiment.scheme("kback", "t5").max_distance == 32


def test_options_of_a_task_override_common_options(file):
    experiment = load(file(T5 + "[text.schemes.t5]\nmax_distance = 100\n"))
    assert experiment.scheme("text", "t5").max_distance == 100
    assert experiment.scheme("kback", "t5").max_distance == 32


def test_rates_are_those_of_a_scheme_for_a_task(file):
    rates = "[text.rates]\nt5 = {learning_rate = 0.016, scheme_rate = 10.0}\n"
    rates += "alibi = {learning_rate = 0.008}\n"
    experiment = load(file(T5 + rates), ["--text.rates.alibi.learning-rate", "0.002"])

    def rate(task, scheme):
        train = experiment.run(task, scheme, 0).task.train
        return train.learning_rate, train.scheme_rate

    assert rate("text", "t5") == (0.016, 10.0) and rate("text", "alibi") == (0.002, 1.0)
    assert rate("text", "rope") == rate("kback", "t5") == (0.003, 1.0)
    # The other schemes' rates are none of the settings of a run.
    without = load(file(T5)).run("text", "rope", 0)
    assert experiment.run("text", "rope", 0).name == without.name
    assert experiment.run("text", "alibi", 0).name != load(file(T5)).run("text", "alibi", 0).name


def test_rates_of_compare_are_those_that_the_study_chose(request):
    root = request.config.rootpath
    lines = csv.DictReader((root / "docs" / "study.csv").read_text().splitlines())
    chosen = {x["scheme"]: x["rate"].partition(" (") for x in lines if x["size"] == "small"}
    text = load(root / "configs" / "compare.toml").tasks["text"]
    expected = {
        name: (float(rate), float(relative.removesuffix(" x)") or 1))
        for name, (rate, _, relative) in chosen.items()
    }
    assert len(expected) == 10
    got = {name: (rate.learning_rate, rate.scheme_rate) for name, rate in text.rates.items()}
    assert got == expected
    assert text.train.learning_rate == expected["rope"][0]


def test_sizes_come_from_the_model(file):
    experiment = load(file(T5), ["--schemes", f"learned,rope,{MINE}"])
    learned = experiment.scheme("text", "learned")
    assert (learned.max_length, learned.model_dim) == (1024, 96)
    assert experiment.scheme("kback", "rope").head_dim == 16
    assert experiment.scheme("kback", MINE).model_dim == 64


def test_max_length_is_the_longest_and_trained_length_the_trained_one(file):
    experiment = load(file(T5), ["--schemes", "experiments_mine:Lengths"])
    lengths = experiment.scheme("text", "experiments_mine:Lengths")
    assert (lengths.max_length, lengths.trained_length) == (1024, 128)
    fope = load(file(T5), ["--schemes", "fope"]).scheme("text", "fope")
    assert fope.trained_length == 128
    assert not has_table(fope) and has_table(experiment.scheme("text", "experiments_mine:Lengths"))


def test_partials_are_factories(file):
    narrow = "experiments_mine:narrow"
    assert load(file(T5), ["--schemes", narrow]).scheme("kback", narrow).clip == 4
    changed = load(file(T5), ["--schemes", narrow, f"--schemes.{narrow}.clip", "5"])
    assert changed.scheme("kback", narrow).clip == 5


def test_chain_parts_have_their_own_options(file):
    flags = ["--schemes", "rope + t5", "--schemes.rope.theta", "100"]
    path = file(T5 + "[kback.schemes.t5]\nnum_buckets = 8\n")
    rope, t5 = load(path, flags).scheme("kback", "rope + t5").schemes
    assert (rope.theta, t5.num_buckets, t5.max_distance) == (100.0, 8, 32)


def test_settings_round_trip_through_toml(file):
    before = load(file(T5), ["--schemes", f"t5,{MINE}", f"--schemes.{MINE}.strength", "2"])
    again = from_file(tomllib.loads(tomli_w.dumps(before.to_tables())))
    assert again == before
    assert again.scheme("kback", MINE).strength == 2.0


def test_quick_applies_its_table(file):
    path = file(
        "seeds = 2\n[kback]\noffset = 3\n[quick]\ntasks = ['kback']\n[quick.kback.model]\n"
        "model_dim = 32\n[quick.schemes]\nnames = ['rope']\n"
    )
    experiment = load(path, [], quick=True)
    assert list(experiment.tasks) == ["kback"] and experiment.schemes == ("rope",)
    kback = experiment.tasks["kback"]
    assert kback.offset == 3 and kback.model.model_dim == 32 and experiment.seeds == 2


@pytest.mark.parametrize("arguments", [[], ["--help"], ["compare", "--help"], ["report", "-h"]])
def test_help_names_the_command(arguments, capsys):
    try:
        assert main(arguments) == 0
    except SystemExit as stop:
        assert stop.code == 0
    assert "python -m experiments" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["compare", "context"])
def test_files_in_configs_are_valid_and_name_their_command(name, request):
    path = request.config.rootpath / "configs" / f"{name}.toml"
    assert isinstance(load(path), Experiment)
    assert f"configs/{name}.toml" in path.read_text().partition("\n\n")[0]
    assert "minute" in path.read_text() or "second" in path.read_text()
