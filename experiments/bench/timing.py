"""Interleaved timing: every case once per round, in an order that rotates by one per round.

Other load of the machine then affects all cases alike. The least time is closest to an undisturbed
run; the median shows the disturbance.
"""

import dataclasses
import gc
import statistics
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import jax


@dataclasses.dataclass(frozen=True)
class Timing:
    """Seconds of one case over all rounds, and their ratios to the first case."""

    name: str
    least: float
    median: float
    ratio: float
    median_ratio: float
    rounds: int


def side_by_side(
    cases: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 15,
    seconds: float = 30.0,
    units: Mapping[str, int] = MappingProxyType({}),
    warm: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> list[Timing]:
    """Returns the timings of cases; the first is the reference.

    Args:
      cases: functions without arguments that return arrays, or trees of arrays.
      rounds: the least number; up to four times that number until `seconds` are over.
      seconds: time to continue beyond `rounds`.
      units: the number of steps of a call, by which its times are divided.
      warm: calls of each case before the first round.
      clock: in seconds.
    """
    names = list(cases)
    for name in names:
        for _ in range(warm):
            jax.block_until_ready(cases[name]())
    took: dict[str, list[float]] = {name: [] for name in names}
    end = time.perf_counter() + seconds
    gc.collect()
    gc.disable()
    try:
        for i in range(4 * rounds):
            if i >= rounds and time.perf_counter() > end:
                break
            for name in names[i % len(names) :] + names[: i % len(names)]:
                began = clock()
                result = jax.block_until_ready(cases[name]())
                took[name].append((clock() - began) / units.get(name, 1))
                del result
    finally:
        gc.enable()
    least = {name: min(times) for name, times in took.items()}
    median = {name: statistics.median(times) for name, times in took.items()}
    first = names[0]
    return [
        Timing(
            name,
            least[name],
            median[name],
            least[name] / least[first],
            median[name] / median[first],
            len(took[name]),
        )
        for name in names
    ]


def show(title: str, timings: list[Timing]) -> None:
    """Prints timings as a table."""
    print(f"\n{title}  ({timings[0].rounds} rounds)")
    print(f"  {'':34s} {'least ms':>9s} {'median ms':>10s} {'ratio':>7s} {'of medians':>11s}")
    for t in timings:
        numbers = (
            f"{t.least * 1e3:9.3f} {t.median * 1e3:10.3f} {t.ratio:7.2f} {t.median_ratio:11.2f}"
        )
        print(f"  {t.name:34s} {numbers}", flush=True)
