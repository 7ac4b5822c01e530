"""Settings: errors are one line with status 2, before anything is written."""

import csv
import importlib.util
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w

from experiments.__main__ import main
from experiments.errors import ConfigError
from experiments.models.schemes import has_table
from experiments.runs.experiment import Experiment, from_file, load
from tests.experiments.one_line import raises, refusal

MINE = "mymod:Parity"


@pytest.fixture(autouse=True)
def own_module(monkeypatch):
    """Makes tests/experiments/mine.py importable as mymod."""
    spec = importlib.util.spec_from_file_location("mymod", Path(__file__).with_name("mine.py"))
    monkeypatch.setitem(sys.modules, "mymod", module := importlib.util.module_from_spec(spec))
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

LEARNED = "[schemes]\nnames = ['learned']\n[schemes.learned]\n"
IN_FILE = [
    (
        "kback.test_lengths[1]: must be a valid integer, got 'x'",
        "[kback]\ntest_lengths = [32, 'x']",
    ),
    ("unknown option of T5; did you mean 'max_distance'?", "[schemes.t5]\nmax_distence = 3"),
    ("schemes: unknown scheme 'ropee'; did you mean 'rope'?", "[schemes]\nnames = ['ropee']"),
    ("learned.model_dim: 8, but the model of task kback has 64", f"{LEARNED}model_dim = 8"),
    ("schemes.learned.stddev: must be a finite number, got inf", f"{LEARNED}stddev = inf"),
    ("text.rates: there is no scheme 'ropee'", "[text.rates]\nropee = {learning_rate = 1e-3}"),
    ("text.rates.rope.learning_rate: must be greater", "[text.rates.rope]\nlearning_rate = -1.0"),
    ("cannot be read", "seeds = = 1"),
    ("is nested too deeply", "seeds = " + "[" * 3000 + "]" * 3000),
    ("a.toml: a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a.a: is nested", f"{'a.' * 5000}a = 1"),
    (
        "a.toml: kback.train.steps: must be below 2**31, got 1329 bits",
        f"kback.train.steps = {10**400}",
    ),
    ("kback.test_lengths[1]: must be below 2**31", "[kback]\ntest_lengths = [32, 10000000000]"),
    (r"name: must be the name of a folder, got 'a\x00b'", r'name = "a\u0000b"'),
]


@pytest.mark.parametrize(("message", "text"), IN_FILE)
def test_invalid_file_is_one_line(file, message, text):
    with raises(ConfigError, message):
        load(file(text))


ON_THE_COMMAND_LINE = [
    ("kback.model.d_modle: unknown setting of Model; did you mean 'model_dim'?",
     "--kback.model.d-modle=3"),
    ("sedes: unknown setting of Experiment; did you mean 'seeds'?", "--sedes 3"),
    ("name: must be the name of a folder, got '..'", "--name .."),
    ("tasks: unknown task 'kbak'; did you mean 'kback'?", "--tasks kbak"),
    ("kback.train.steps: must be a multiple of kback.train.steps_per_call = 25 and more than "
     "kback.train.warmup = 50, got 50; the nearest is 75", "--kback.train.steps 50"),
    ("got 80; the nearest is 90", "--kback.train.steps 80 --kback.train.steps-per-call 30"),
    ("model_dim: 63 is not divisible by kback.model.num_heads = 4", "--kback.model.model-dim 63"),
    ("schemes.rope: task kback: rope: rotary dim must be even", "--kback.model.model-dim 20"),
    ("schemes.t5.max_distance: 64 exceeds kback.train_length = 32", "--schemes.t5.max-distance 64"),
    ("kback.test_lengths: begins with 16, shorter than the", "--kback.test-lengths 16,32"),
    ("kback.offset: 31 leaves no query in", "--kback.offset 31"),
    ("text.corpus: must be the name of a corpus or a path, got", "--tasks text --text.corpus="),
    ("200 does not divide the longest", "--tasks text --text.test-lengths 128,200,1024"),
    ("text.stride: 33 does not divide", "--tasks text --text.stride 33"),
    ("text.sliding_lengths: 16 is not among text.test_lengths [128, 256, 512, 1024], and not from",
     "--tasks text --text.sliding-lengths 16"),
    ("text.ngram: no 6-gram repeats within text.sliding_lengths [4]",
     "--tasks text --text.stride 4 --text.ngram 6 --text.sliding-lengths 4,128"),
    ("unknown variant 'nkt'; did you mean 'ntk'?", "--tasks text --text.variants nkt"),
    ("kth.shortest: 31 symbols do not fit", "--tasks kth --kth.shortest 31"),
    ("schemes: cannot import 'no_such_module'", "--schemes no_such_module:A"),
    ("has no 'Parite'; did you mean 'Parity'?", "--schemes mymod:Parite"),
    ("must be a Scheme or a subclass of it, a tuple of layers, or", "--schemes mymod:NoScheme"),
    (f"schemes.{MINE}.strenght: unknown option of Parity; did you mean 'strength'?",
     f"--schemes {MINE} --schemes.{MINE}.strenght 3"),
    ("schemes.mymod:Unhashable: unhashable type: 'list'", "--schemes mymod:Unhashable"),
    ("overrides none of embed, mix, query, key, value, rules, at", "--schemes mymod:Misspelt"),
    ("needs a Scheme or a tuple of layers, got None", "--schemes mymod:nothing"),
    ("mymod:raises: task kback: RuntimeError: no scheme", "--schemes mymod:raises"),
    ("schemes.mymod:exits: task kback: SystemExit: 3", "--schemes mymod:exits"),
    ("return one (-> pe.Scheme), got <function unannotated", "--schemes mymod:unannotated"),
    ("is nested too deeply", f"--{'a.' * 3000}a 1"),
    ("argument --minutes: must be a number from 0 on, got 'nan'", "--minutes nan"),
    (f"must name some, each once, got ['rope+{MINE}'", f"--schemes rope+{MINE},rope+{MINE}"),
    (f"{MINE} and mine:Parity would both be 'Parity'", f"--schemes {MINE},mine:Parity"),
    ("the pattern must have from 1 to 2 layers, got 9", "--schemes mymod:long_pattern"),
    ("mymod:both.theta: mymod:both is an", "--schemes mymod:both --schemes.mymod:both.theta 3"),
    ("chain:", "--schemes shaw+shaw"),
    (f"tasks: '{MINE}' is no subclass of Task", f"--tasks {MINE}"),
    ("tasks: 'mymod:Unfinished' must define fill, most, vocab_size", "--tasks mymod:Unfinished"),
    ("tasks: 'mymod:Options' must have a name that is a word, and", "--tasks mymod:Options"),
    ("tasks: two have one name", "--tasks kback,experiments.tasks:KBack"),
    ("has no table [quick], which --quick needs", "--quick"),
]  # fmt: skip


@pytest.mark.parametrize(("message", "arguments"), ON_THE_COMMAND_LINE)
def test_invalid_command_line_is_one_line_and_writes_nothing(
    file, tmp_path, capsys, message, arguments
):
    results = tmp_path / "results"
    path = file(T5 + "[text.schemes.t5]\nmax_distance = 128\n")
    tasks = [] if "--tasks" in arguments else ["--tasks", "kback"]
    err = refusal(capsys, "compare", path, "--results", results, *tasks, *arguments.split())
    assert message in err and err.startswith("config error: ")
    assert not results.exists() and not Path("called").exists()


def test_missing_file_and_unknown_command(capsys):
    message = "config error: none.toml: no such file\n"
    assert refusal(capsys, "compare", "none.toml") == message
    assert "did you mean 'compare'?" in refusal(capsys, "compair")


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


def test_rates_are_those_of_a_scheme_for_a_task(file):
    rates = "[text.rates]\nt5 = {learning_rate = 0.016, scheme_rate = 10.0}\n"
    rates += '"rope + alibi" = {learning_rate = 0.5}\nalibi = {learning_rate = 0.008}\n'
    experiment = load(file(T5 + rates), ["--text.rates.alibi.learning-rate", "0.002"])

    def rate(task, scheme):
        train = experiment.run(task, scheme, 0).task.train
        return train.learning_rate, train.scheme_rate

    assert rate("text", "t5") == (0.016, 10.0) and rate("text", "alibi") == (0.002, 1.0)
    assert rate("text", "rope") == rate("kback", "t5") == (0.003, 1.0)
    assert rate("text", "rope+alibi") == (0.5, 1.0)
    # The other schemes' rates are none of the settings of a run.
    without = load(file(T5)).run("text", "rope", 0)
    assert experiment.run("text", "rope", 0).name == without.name
    assert experiment.run("text", "alibi", 0).name != load(file(T5)).run("text", "alibi", 0).name


def test_rates_of_compare_are_those_that_the_study_chose(request):
    root = request.config.rootpath
    lines = csv.DictReader((root / "docs" / "study.csv").read_text().splitlines())
    chosen = {x["scheme"]: x["rate"].partition(" (") for x in lines if x["size"] == "small"}
    text = load(root / "configs" / "compare.toml").tasks["text"]
    rates = {name: (rate.learning_rate, rate.scheme_rate) for name, rate in text.rates.items()}
    assert len(rates) == 10 and text.train.learning_rate == rates["rope"][0]
    assert rates == {
        name: (float(rate), float(relative.removesuffix(" x)") or 1))
        for name, (rate, _, relative) in chosen.items()
    }


def test_sizes_come_from_the_model_and_lengths_from_the_task(file):
    experiment = load(file(T5), ["--schemes", f"rope,fope,{MINE},mymod:Lengths,mymod:narrow"])
    lengths, fope = (experiment.scheme("text", name) for name in ("mymod:Lengths", "fope"))
    assert (lengths.max_length, lengths.trained_length) == (1024, 128)
    assert fope.trained_length == 128 and has_table(lengths) and not has_table(fope)
    assert experiment.scheme("kback", "rope").head_dim == 16
    assert experiment.scheme("kback", MINE).model_dim == 64
    assert experiment.scheme("kback", "mymod:narrow").clip == 4  # A partial is a factory.


def test_chain_parts_have_their_own_options(file):
    flags = ["--schemes", "rope + t5", "--schemes.rope.theta", "100"]
    path = file(T5 + "num_buckets = 24\n[kback.schemes.t5]\nnum_buckets = 8\n")  # It comes first.
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
    with pytest.raises(ConfigError, match="quick: must be a table, got True"):
        load(file("quick = true"), quick=True)


def test_help_names_the_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["compare", "--help"])
    assert "python -m experiments compare [" in capsys.readouterr().out
    assert main([]) == 0 and "python -m experiments <command>" in capsys.readouterr().out


def test_the_file_of_contexts_is_valid(request):
    assert isinstance(load(request.config.rootpath / "configs/context.toml"), Experiment)
