"""Verdicts made of correctness steps: by subject, with a limit on the time of each step."""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from posenc_jax.engine.verdicts import DECODE, Subject, Verdict, key_of, write
from posenc_jax.prove import cases
from posenc_jax.prove.steps import Step, steps

SECONDS = 120
"""The time that a step may take, compilation included."""


class Outcome(NamedTuple):
    """The result of a step.

    Attributes:
      step: the step.
      fault: the first wrong place in words, or an error; None: it is right.
      refused: why there is no kernel for the step, which then says nothing; or None.
      lost: whether the chip no longer answers, so that no other step can run.
      seconds: the time it took.
    """

    step: Step
    fault: str | None
    refused: str | None
    lost: bool
    seconds: float


class ChipLostError(RuntimeError):
    """The chip no longer answers, after a step that this names."""


def subject_of(step: Step) -> Subject | None:
    """Returns the subject of a step; None for primitives, which belong to every subject."""
    if step.family == "primitives":
        return None
    decodes = step.family == "decode" and jax.default_backend() != "gpu"
    return Subject(DECODE if decodes else step.rule_class, step.dtype, step.head_dim)


def plan(
    rule_classes: Collection[str] | None = None,
    dtypes: Iterable[str] = ("bfloat16",),
    head_dims: Iterable[int] = (64, 128),
    **options: Any,
) -> dict[Subject | None, list[Step]]:
    """Returns the steps of each subject, and the primitives under None, which come first.

    Args:
      rule_classes: None for all.
      dtypes, head_dims: any that the chip has kernels for.
      **options: of `steps`.
    """
    groups: dict[Subject | None, list[Step]] = {None: steps(family="primitives", **options)}
    for dtype, head_dim in itertools.product(dtypes, head_dims):
        for step in steps(dtype=dtype, head_dim=head_dim, **options):
            subject = subject_of(step)
            if subject and (rule_classes is None or subject.rule_class in rule_classes):
                groups.setdefault(subject, []).append(step)
    return groups


def run(
    steps: Iterable[Step],
    seconds: float = SECONDS,
    announce: Callable[[Step], None] = lambda _: None,
) -> Iterator[Outcome]:
    """Runs steps one after the other, and yields their outcomes, up to a loss of the chip.

    Args:
      steps: the steps.
      seconds: the time that each may take.
      announce: called with each step before it runs.
    """
    for step in steps:
        announce(step)
        began, fault, refused, lost = time.monotonic(), None, None, False
        try:
            fault = _in_thread(step.run, seconds)
        except NotImplementedError as error:
            refused = _words(error)
        except TimeoutError:
            fault, lost = f"no result in {seconds:g} s", True
        except Exception as error:
            fault, lost = f"{type(error).__name__}: {_words(error)}", not _answers()
        yield Outcome(step, fault, refused, lost, time.monotonic() - began)
        if lost:
            return


def verdict_of(outcomes: Iterable[Outcome]) -> Verdict | None:
    """Returns the verdict on a subject from its steps and the primitives; None if none ran."""
    ran = [outcome for outcome in outcomes if outcome.refused is None]
    fault = next((f"{x.step.name}: {x.fault}" for x in ran if x.fault is not None), None)
    if fault is None and all(subject_of(x.step) is None for x in ran):
        return None
    return Verdict(fault, len(ran), time.time())


def make(subject: Subject, **options: Any) -> Verdict | None:
    """Returns the verdict on a subject, up to the first fault; None where no step is about it.

    It may be called while something is traced.

    Raises:
      ChipLostError: if the chip no longer answers.
    """
    outcomes: list[Outcome] = []
    chosen = [subject.rule_class], [subject.dtype], [subject.head_dim]
    groups = _in_thread(lambda: plan(*chosen, **options), SECONDS)
    for outcome in run(itertools.chain(*groups.values())):
        outcomes.append(outcome)
        if outcome.fault is not None:
            break
    verdict = verdict_of(outcomes)
    if outcomes and outcomes[-1].lost:
        if verdict is not None:
            with contextlib.suppress(OSError):  # For the next process.
                write(key_of(subject), verdict)
        name, fault = outcomes[-1].step.name, outcomes[-1].fault
        raise ChipLostError(f"attention: the chip no longer answers, after {name}: {fault}")
    # The caller goes on, and needs the memory.
    cases.inputs.cache_clear()
    cases.executable.cache_clear()
    return verdict


def _in_thread(run: Callable[[], Any], seconds: float) -> Any:
    """Returns `run()`, run in a thread of its own.

    Traces, meshes, the precision of products and the default device belong to threads in JAX, so
    none of the caller's reaches it. A thread that hangs is left behind.

    Raises:
      TimeoutError: after this many seconds.
    """
    results: queue.SimpleQueue = queue.SimpleQueue()

    def put():
        try:
            results.put((run(), None))
        except BaseException as error:
            results.put((None, error))

    threading.Thread(target=put, daemon=True).start()
    try:
        result, error = results.get(timeout=seconds)
    except queue.Empty:
        raise TimeoutError from None
    if error is not None:
        raise error
    return result


def _answers() -> bool:
    """Returns whether the chip still computes; after an illegal access, a GPU does not."""
    try:
        return bool(_in_thread(lambda: jax.device_get(jnp.ones(8) + 1).sum() == 16, 20.0))
    except Exception:
        return False


def _words(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
