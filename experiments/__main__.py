"""The command line: `python -m experiments <command> [file.toml] [changes]`."""

import importlib
import io
import os
import sys

from experiments.errors import ConfigError, ExperimentError

HELP = """Language models that differ only in the position encoding.

python -m experiments <command> [file] [changes]

With a released model: SmolLM2, which make released installs, or a GGUF or safetensors file.

  released   its text, its speed, and its loss beyond the trained
             length, in 3 to 7 minutes                       model.gguf (or none)
  lengths    twelve documents with sixteen methods,
             retrieval and copying                           configs/lengths.toml

With tiny models, trained here:

  compare    train every scheme on every task, evaluate at and beyond the training
             length, and write a report                      configs/compare.toml
  study      the same question at learning rates chosen for
             each scheme, with seeds and intervals           configs/study.toml
  scoreboard test claims of the literature, write their
             outcomes to docs/results.md                     configs/scoreboard/
  report     write report.html again from results of runs    a folder of results

With none:

  bench      measure speed as ratios
  gallery    draw the effect of every scheme
  drawn      draw the pictures of docs/drawn.md

A TOML file describes one experiment; any setting of it can be changed on the command line:

  python -m experiments released
  python -m experiments released model.gguf --text book.txt --methods rope,yarn,self_extend
  python -m experiments compare configs/compare.toml
  python -m experiments compare configs/compare.toml --quick
  python -m experiments compare --schemes rope,alibi --seeds 3 --name three-seeds
  python -m experiments compare --schemes rope,rope+alibi,mypkg.mine:MyScheme
  python -m experiments compare --schemes t5 --schemes.t5.num-buckets 16 --name small-t5
  python -m experiments compare --tasks text --text.corpus ~/my-texts --name mine
  python -m experiments compare --tasks mypkg.mine:MyTask --name my-task
  python -m experiments report results/compare

Results go to results/<name>/. Ctrl-C keeps finished runs, and compare, study and scoreboard stop
after --minutes, with status 3; the same command continues.
`python -m experiments compare --help` lists every setting.
"""

_COMMANDS = {
    "compare": "experiments.commands.compare",
    "report": "experiments.commands.compare:report",
    "study": "experiments.study.command",
    "scoreboard": "experiments.scoreboard.command",
    "bench": "experiments.bench",
    "released": "experiments.released.command",
    "lengths": "experiments.lengths.command",
    "gallery": "experiments.gallery.page",
    "drawn": "experiments.gallery.drawn",
}


def main(arguments: list[str]) -> int:
    """Runs a command and returns the exit status.

    It is 1 if a run failed, 2 for errors of the user, 3 if the time is over, 130 after Ctrl-C.
    """
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(HELP, end="")
        return 0
    name = arguments[0]
    if isinstance(sys.stdout, io.TextIOWrapper):  # Texts have characters that terminals lack.
        sys.stdout.reconfigure(errors="replace")
    try:
        if name in _COMMANDS:
            module, _, function = _COMMANDS[name].partition(":")
            return getattr(_module(module), function or "main")(arguments[1:])
        near = _module("experiments.settings.config_io").near(name, _COMMANDS)
        raise ConfigError(f"unknown command {name!r}{near}")
    except (ExperimentError, PermissionError) as error:
        kind = "config error" if isinstance(error, ConfigError) else "error"
        print(f"{kind}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # Of `| head`; the rest of the output goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        return 130


def _module(name: str):
    """Imports a module when its command is called: some need seconds to import."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{error}; run .venv/bin/python, which make compare makes, or "
            'pip install -e ".[experiments]"'
        ) from None


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
