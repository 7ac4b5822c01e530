"""Checks the kernels of this package on the chip that is there, and keeps the verdicts.

    python -m posenc_jax.prove                                   the usual dtype and head dims
    python -m posenc_jax.prove --rule-class none distance        for T5 and ALiBi
    python -m posenc_jax.prove --dtype float32 --head-dim 96     others
    python -m posenc_jax.prove --list                            the steps, without running them

attention(implementation="pallas") runs kernels for TPU v5e, v5p, v6e and 7x and for H100 and H200.
Compilers and interpreters checked them; whether a chip computes them right, only the chip can show.
So implementation=None takes them only where this program saw that they are right:

1. It runs each step on the chip: single operations of the kernels first, then the output and the
   gradients of attention, against numbers that are computed in another way.
2. It writes a verdict, right or wrong, for each rule class, dtype and head dim. Verdicts are about
   one kind of chip and the versions of the compiler, of jax and of this package: after an update
   of any of these, run it again.
3. Programs that start later read the verdicts. They need the one of "none", for masks and grouped
   heads, and one of each class of their rules: "distance" (T5, ALiBi, KERPLE), "separable" (FoX),
   "product" (Inkling, Shaw, Transformer-XL, DeBERTa), "pair" (functions of two tokens, whose own
   operations the steps do not run), "array" (biases of all pairs); or "decode" for a few tokens at
   a time on TPU.
   `python -m posenc_jax` prints the verdicts.

Verdicts lie in $POSENC_JAX_CACHE_DIR, else in $XDG_CACHE_HOME/posenc_jax or ~/.cache/posenc_jax;
remove the files to forget them. A program of several processes reads them only if each process has
POSENC_JAX_CACHE_DIR, naming a folder that they share, and only those made before it started: if
processes chose differently, they would wait for each other forever.

With POSENC_JAX_PROVE=1 in its environment, a program of one process runs the steps itself when it
first traces attention of a class without a verdict; that takes minutes, once.

Exit status: 0 if all that ran is right, 1 if something is wrong, 2 for a wrong call, or without a
chip that there are kernels for.
"""

import argparse
import itertools
import os
import sys
from typing import Any

import jax

from posenc_jax.__main__ import runs
from posenc_jax.engine import verdicts
from posenc_jax.engine.verdicts import Subject
from posenc_jax.prove.steps import Step
from posenc_jax.prove.verdicts import SECONDS, Outcome, plan, run, verdict_of


def main(arguments: list[str] | None = None, **options: Any) -> int:
    """Runs the program, and returns its exit status.

    Args:
      arguments: of the command line.
      **options: of `posenc_jax.prove.steps.steps`.
    """
    parser = argparse.ArgumentParser(
        prog="python -m posenc_jax.prove",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--rule-class", nargs="+", metavar="CLASS", help="see above; default: all")
    dtypes = "bfloat16", "float16", "float32"
    add("--dtype", nargs="+", choices=dtypes, default=dtypes[:1], help="default: bfloat16")
    add("--head-dim", nargs="+", type=_positive, default=(64, 128), help="default: 64 128")
    add("--seconds", type=_positive, default=SECONDS, help=f"for a step; default: {SECONDS}")
    add("--list", action="store_true", help="print the steps, and run none")
    parsed = parser.parse_args(arguments)
    groups = plan(parsed.rule_class, parsed.dtype, parsed.head_dim, **options)
    known = {subject.rule_class for subject in groups if subject}
    if unknown := {*(parsed.rule_class or ())} - known:
        parser.error(f"there is no step of rule class {', '.join(sorted(unknown))}; see --list")
    if parsed.list:
        for subject, steps in groups.items():
            print(subject or "for every rule class")
            print(*(f"  {step.name}" for step in steps), sep="\n")
        return 0
    if (reason := runs("pallas")) != "runs":
        print(f"error: {reason}", file=sys.stderr)
        return 2
    try:
        return _prove(groups, parsed.seconds)
    except OSError as error:
        print(f"error: verdicts cannot be written: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nStopped. Verdicts so far are kept.", file=sys.stderr)
        return 130


def _prove(groups: dict[Subject | None, list[Step]], seconds: float) -> int:
    """Runs the steps of all subjects, prints their outcomes, and writes the verdicts."""
    total, counter = sum(map(len, groups.values())), itertools.count(1)

    def announce(step: Step) -> None:
        print(f"{next(counter):3}/{total} {step.name} ... ", end="", flush=True)

    verdicts.folder().mkdir(parents=True, exist_ok=True)
    print(f"{jax.local_devices()[0].device_kind}: {total} steps; verdicts in {verdicts.folder()}")
    shared: list[Outcome] = []
    lines, ran, lost = [], [], False
    for subject, steps in groups.items():
        outcomes = []
        for outcome in run([] if lost else steps, seconds, announce):
            print(_words(outcome), flush=True)
            outcomes.append(outcome)
            lost = outcome.lost
        ran += outcomes
        if subject is None:
            shared = outcomes
        elif (verdict := verdict_of([*shared, *outcomes])) is not None:
            verdicts.write(verdicts.key_of(subject), verdict)
            lines.append(f"{'right' if verdict.fault is None else 'WRONG'}: {subject}")
    print(*lines, sep="\n")
    if lost:
        print("The chip no longer answers, and other steps did not run.")
    if not lines:
        print("error: there are no kernels here for any of these steps", file=sys.stderr)
        return 2
    if any(outcome.fault is not None for outcome in ran):
        print("What is wrong is not used. Please report this and `python -m posenc_jax`.")
        return 1
    return 0


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"must be a positive integer, got {text!r}")
    return int(text)


def _words(outcome: Outcome) -> str:
    """Returns an outcome for a line of the screen."""
    if outcome.refused is not None:
        return f"no kernel: {outcome.refused}"
    if outcome.fault is not None:
        return f"WRONG: {outcome.fault}"
    return f"right, {outcome.seconds:.1f} s"


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # A step without result would hold the interpreter at its exit.
