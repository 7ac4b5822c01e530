"""The command line: `python -m experiments <command> [file.toml] [changes]`."""

import sys
from collections.abc import Callable
from pathlib import Path

from experiments.strict import ConfigError, near

HELP = """Tiny language models that differ in nothing but the position encoding.

python -m experiments <command> [file.toml] [changes]

  compare    train every scheme on every task, evaluate at and beyond the training
             length, and write a report                      configs/compare.toml
  train      the same, and keep the trained parameters       configs/kback.toml
  evaluate   measure kept parameters again, at will          configs/text_length.toml
  report     write report.html again from results.json       a folder of results
  bench      measure speed as ratios
  gallery    draw what every scheme does, on one page
  schemes    print a table of all schemes

A file describes one experiment; any setting of it can be changed on the command line:

  python -m experiments compare configs/compare.toml
  python -m experiments compare configs/compare.toml --quick
  python -m experiments compare --schemes rope,alibi --seeds 3 --name three-seeds
  python -m experiments compare --schemes rope,mypkg.mine:MyScheme
  python -m experiments compare --schemes t5 --schemes.t5.num-buckets 16 --name small-t5
  python -m experiments compare --tasks text --text.corpus ~/my-texts --name mine
  python -m experiments report results/compare

Results go to results/<name>/. Ctrl-C keeps what is finished; the same command goes on from
there. `python -m experiments compare --help` lists every setting.
"""

_DEFAULTS = {
    "compare": "configs/compare.toml",
    "train": "configs/kback.toml",
    "evaluate": "configs/kback.toml",
}


def main(arguments: list[str]) -> int:
    """Runs a command and returns the exit status: 2 for what cannot be done at all."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    name, rest = arguments[0], arguments[1:]
    commands: dict[str, Callable[[list[str]], int]] = {
        "compare": lambda rest: _run("compare", rest),
        "train": lambda rest: _run("train", rest),
        "evaluate": lambda rest: _run("evaluate", rest),
        "report": _report,
        "bench": _bench,
        "gallery": _gallery,
        "schemes": _schemes,
    }
    try:
        if name not in commands:
            raise ConfigError(f"unknown command {name!r}{near(name, commands)}")
        return commands[name](rest)
    except ConfigError as error:
        print(f"config error: {error}", file=sys.stderr)
    except RuntimeError as error:
        if type(error).__name__ not in ("CorpusError", "ResultsError"):
            raise
        print(f"error: {error}", file=sys.stderr)
    return 2


def _run(command: str, arguments: list[str]) -> int:
    """Reads the experiment before anything slow is imported, and carries it out."""
    flags = {flag: flag in arguments for flag in ("--quick", "--fresh")}
    arguments = ["--help" if a == "-h" else a for a in arguments if a not in flags]
    file = _DEFAULTS[command]
    if arguments and not arguments[0].startswith("-"):
        file = arguments.pop(0)

    from experiments.config import load

    experiment = load(
        Path(file),
        arguments,
        quick=flags["--quick"],
        program=f"python -m experiments {command} [{file}] [--quick] [--fresh]",
    )
    if command == "evaluate":
        from experiments.compare import evaluate_again

        return evaluate_again(experiment)
    from experiments.compare import compare

    return compare(experiment, fresh=flags["--fresh"], keep=command == "train")


def _report(arguments: list[str]) -> int:
    folder, *rest = arguments or ["--help"]
    if folder in ("-h", "--help") or rest[:-1] not in ([], ["--plot"]) or len(rest) == 1:
        print(
            "python -m experiments report results/<name> [--plot length.svg]\n\n"
            "Writes report.html again, or only its plot of loss against length."
        )
        return 0 if "-h" in arguments or "--help" in arguments else 2
    from experiments.report import write_plot, write_report

    try:
        if rest:
            print(f"Plot: {write_plot(Path(folder), Path(rest[1]))}")
        else:
            print(f"Report: {write_report(Path(folder))}")
    except (OSError, ValueError) as error:
        raise ConfigError(str(error)) from None
    return 0


def _schemes(arguments: list[str]) -> int:
    from experiments.catalogue import main as show

    return show(arguments)


def _gallery(arguments: list[str]) -> int:
    """Imported here: drawing needs JAX and matplotlib."""
    from experiments.gallery.page import main as draw

    return draw(arguments)


def _bench(arguments: list[str]) -> int:
    from experiments.bench import main as bench

    return bench(arguments)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
