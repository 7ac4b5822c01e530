"""Times that others measured on an H100, and the goals beside them, for `make gpu`.

The times are tokamax's, commit 783ea95, tokamax/data/autotuning/nvidia_h100_80gb_hbm3: medians of
"evaluation_times_ms" of the best configuration, bfloat16; https://github.com/openxla/tokamax.
Rates count as ours do: 2 B N T^2 H FLOP forward where attention is causal, twice as much where it
is not, and 2.5 times that for the backward pass alone.
"""

from typing import Any, NamedTuple

FORWARD, BOTH, BACKWARD = "forward", "forward+backward", "backward"
TOKENS, HEADS, DIM = 16384, 16, 128
"""B T, N and H of the causal anchors."""
PAIR = {"batch": 128, "length": 2048, "heads": 4, "dim": 32}
"""Sizes of the anchors with a bias [1, N, T, T], not causal, as in AlphaFold."""
CARD = "H100"


class Anchor(NamedTuple):
    """A time of tokamax's data; `name` is "none" or "pair"."""

    name: str
    by: str
    what: str
    length: int
    ms: float

    @property
    def rate(self) -> float:
        """TFLOP/s."""
        return flop(self.name, self.what, self.length) / self.ms / 1e9


_CAUSAL = {
    (FORWARD, "cuDNN by jax.nn"): (0.462, 0.873, 1.704),
    (FORWARD, "tokamax, Mosaic"): (0.484, 0.887, 1.726),
    (FORWARD, "tokamax, Triton"): (0.798, 1.503, 3.030),
    (BACKWARD, "tokamax, Mosaic"): (1.686, 3.135, 6.083),
    (BACKWARD, "tokamax, Triton"): (2.191, 4.145, 8.141),
}
_PAIR = {
    (FORWARD, "cuDNN by jax.nn"): 5.563,
    (FORWARD, "tokamax, Mosaic"): 1.668,
    (FORWARD, "tokamax, Triton"): 2.188,
    (BACKWARD, "tokamax, Mosaic"): 10.224,
    (BACKWARD, "tokamax, Triton"): 8.497,
}
ANCHORS = [
    Anchor("none", by, what, length, ms)
    for (what, by), row in _CAUSAL.items()
    for length, ms in zip((4096, 8192, 16384), row, strict=True)
] + [Anchor("pair", by, what, PAIR["length"], ms) for (what, by), ms in _PAIR.items()]


def flop(name: str, what: str, length: int) -> float:
    """Returns the FLOP of an anchor's problem."""
    forward = 2.0 * TOKENS * HEADS * length * DIM
    if name == "pair":
        forward = 4.0 * PAIR["batch"] * PAIR["heads"] * length**2 * PAIR["dim"]
    return forward * {FORWARD: 1.0, BACKWARD: 2.5, BOTH: 3.5}[what]


def rate(rows: list[dict[str, Any]], name: str, by: str, what: str, length: int) -> float | None:
    """Returns TFLOP/s of measurements, or None; the backward pass is a difference of two times."""
    times = {
        row["what"]: row
        for row in rows
        if (row["name"], row["by"], row["T"]) == (name, by, length) and "ms" in row
    }
    if what != BACKWARD:
        return times[what]["TFLOP/s"] if what in times else None
    if not {FORWARD, BOTH} <= {*times}:
        return None
    ms = times[BOTH]["ms"] - times[FORWARD]["ms"]
    return (times[BOTH]["flop"] - times[FORWARD]["flop"]) / ms / 1e9 if ms > 0 else None


class Goal(NamedTuple):
    """A measured rate and the least that is wanted, in TFLOP/s, or None if not measured."""

    text: str
    value: float | None
    least: float | None

    @property
    def outcome(self) -> str:
        """The goal, the numbers and whether it was reached."""
        if self.value is None or self.least is None:
            return f"{self.text}: not measured"
        word = "reached" if self.value >= self.least else "NOT reached"
        return f"{self.text}: {self.value:.0f} TFLOP/s, wanted {self.least:.0f}: {word}"


def goals(rows: list[dict[str, Any]], length: int) -> list[Goal]:
    """Returns the goals at a length."""

    def ours(name, what):
        return rate(rows, name, "pallas", what, length)

    def part(share, x):
        return None if x is None else share * x

    cudnn = rate(rows, "none", "jax.nn cudnn", FORWARD, length)
    return [
        Goal(f"T = {length}, none, forward, 0.9 of cuDNN", ours("none", FORWARD), part(0.9, cudnn)),
        Goal(f"T = {length}, none, backward", ours("none", BACKWARD), 400.0),
        Goal(
            f"T = {length}, t5, forward, 0.85 of none",
            ours("t5", FORWARD),
            part(0.85, ours("none", FORWARD)),
        ),
        Goal(
            f"T = {length}, t5, backward, 0.85 of none",
            ours("t5", BACKWARD),
            part(0.85, ours("none", BACKWARD)),
        ),
    ]


def show(rows: list[dict[str, Any]], device: str) -> list[str]:
    """Returns the anchors beside our rates, the materialised bias of `jax.nn`, and the goals."""
    lines = ["", "TFLOP/s of others on an H100 (tokamax 783ea95), and here:"]
    for anchor in ANCHORS:
        name, _, what, length, ms = anchor
        here = {
            by: rate(rows, name, by, what, length)
            for by in ("pallas", "xla", "jax.nn", "jax.nn cudnn", "tokamax")
        }
        measured = ", ".join(f"{by} {x:.0f}" for by, x in here.items() if x is not None)
        lines.append(
            f"{name:5s} {what:9s} T = {length:6d}  {anchor.by:16s} {ms:6.2f} ms {anchor.rate:4.0f}"
            f"  {measured or 'not measured'}"
        )
    for length in sorted({row["T"] for row in rows if row["name"] == "matrix"}):
        for what in (FORWARD, BACKWARD):
            bias = {by: rate(rows, "matrix", by, what, length) for by in ("jax.nn", "jax.nn cudnn")}
            bias |= {"t5 by pallas": rate(rows, "t5", "pallas", what, length)}
            text = ", ".join(f"{by} {x:.0f}" for by, x in bias.items() if x is not None)
            if text:
                lines.append(f"a bias as a matrix, {what:9s} T = {length:6d}  {text}")
    if CARD not in device:
        return [*lines, f"The goals are for an {CARD}."]
    lengths = sorted({a.length for a in ANCHORS if a.name == "none"})
    wanted = [goal for length in lengths for goal in goals(rows, length)]
    pair = rate(rows, "pair", "pallas", BACKWARD, PAIR["length"])
    wanted.append(Goal("a bias per pair, backward, twice tokamax with Mosaic", pair, 2 * 67.0))
    return [*lines, *(f"goal: {goal.outcome}" for goal in wanted)]
