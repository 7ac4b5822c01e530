"""The tables of what `accelerator` measured, and the goals on an H100: a part of docs/gpu.md."""

import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FORWARD, BOTH, BACKWARD = "forward", "forward+backward", "backward"
OURS = "pallas"
OTHERS = {
    "cudnn": '"cudnn"',
    "jax.nn cudnn": "`jax.nn`, cuDNN",
    "torch sdpa cudnn": "SDPA, cuDNN",
    "torch sdpa flash": "SDPA, flash",
    "torch flex": "FlexAttention",
    "xla": '"xla"',
    "jax.nn": "`jax.nn`",
    "default": "`None`",
}
"""Implementations and libraries, with their columns."""
ALONE = ("xla", "default")
"""Implementations whose times say nothing without others beside them."""
Rows = dict[tuple[str, str, str, int], dict[str, Any]]
"""Rows by scheme, implementation, pass and length."""


def line(row: dict[str, Any]) -> str:
    """Returns a row as text, for the log."""
    start = f"{row['name']:15s} {row['by']:13s} {row['what']:17s} {row['T']:6d}"
    for reason in ("error", "unsupported", "skipped"):
        if reason in row:
            return f"{start}  {reason}: {row[reason][:120]}"
    rate = f"{row['TFLOP/s']:7.1f} TFLOP/s" if "TFLOP/s" in row else f"{row['GB/s']:7.0f} GB/s"
    figures = f"{row.get('compile_seconds', 0):6.1f} s, {row.get('megabytes', 0):8.1f} MB"
    return f"{start}  compiled in {figures} {row['ms']:9.3f} ms {rate}"


def read(folder: Path) -> tuple[Rows, dict[str, dict[str, float]]]:
    """Returns the times of a folder, and milliseconds of training steps by size and scheme."""
    times, torch, clock = (_json(folder / f"{x}.json") for x in ("times", "torch", "clock"))
    rows = [row for row in (*times.get("times", ()), *torch.get("rows", ())) if "ms" in row]
    return {(x["name"], x["by"], x["what"], x["T"]): x for x in rows}, clock.get("steps", {})


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def tables(folder: Path) -> str:
    """Returns the tables of a folder of results, in Markdown."""
    rows, steps = read(folder)
    parts = _times(rows), _steps(steps), _goals(rows)
    return "\n\n".join("\n".join(part) for part in parts if len(part) > 2)


def _times(rows: Rows) -> list[str]:
    """Returns our milliseconds, and the times of others as multiples of them."""
    columns = [by for by in OTHERS if any(by == key[1] for key in rows)]
    heads = f'"pallas", ms | TFLOP/s | {" | ".join(OTHERS[by] for by in columns)}'
    lines = [f"| | {heads} |", f"|---|{'---|' * (len(columns) + 2)}"]
    for name, what, length in dict.fromkeys((key[0], *key[2:]) for key in rows):
        ours = rows.get((name, OURS, what, length), {})
        ms = ours.get("ms")
        cells = [f"{ms:.3g}" if ms else "", f"{ours['TFLOP/s']:.0f}" if "TFLOP/s" in ours else ""]
        for by in columns:
            other = rows.get((name, by, what, length), {}).get("ms")
            text = f"{other / ms:.2f}" if ms and other else f"{other:.3g} ms" if other else ""
            cells.append(text)
        if any(text for text, by in zip(cells, ["", "", *columns], strict=True) if by not in ALONE):
            lines.append(f"| {name}, {what}, {length:,} | {' | '.join(cells)} |")
    return lines


def _steps(steps: dict[str, dict[str, float]]) -> list[str]:
    """Returns milliseconds of training steps, and ratios to no scheme."""
    names = list(dict.fromkeys(name for times in steps.values() for name in times))
    lines = [f"| a training step | {' | '.join(names)} |", f"|---|{'---|' * len(names)}"]
    for size, times in steps.items():
        cells = (f"{times[x]:.0f} ms ({times[x] / times['none']:.2f})" for x in names)
        lines.append(f"| {size} parameters | {' | '.join(cells)} |")
    return lines


def _goals(rows: Rows) -> list[str]:
    """Returns rates, with the least that is wanted; those below it are bold."""
    cells: dict[str, dict[int, str]] = {}
    for text, length, value, least in goals(rows):
        number = f"{value:.0f}" if value >= least else f"**{value:.0f}**"
        cells.setdefault(text, {})[length] = f"{number} ({least:.0f})"
    lengths = sorted({length for row in cells.values() for length in row})
    heads = " | ".join(f"T = {length:,}" for length in lengths)
    lines = [f"| TFLOP/s (wanted) | {heads} |", f"|---|{'---|' * len(lengths)}"]
    for text, row in cells.items():
        lines.append(f"| {text} | {' | '.join(row.get(x, '') for x in lengths)} |")
    return lines


def rate(rows: Rows, name: str, by: str, what: str, length: int) -> float | None:
    """Returns TFLOP/s, or None; the backward pass is the difference of both and the forward."""
    forward, both = (rows.get((name, by, x, length)) for x in (FORWARD, BOTH))
    if forward is None or what == FORWARD:
        return None if forward is None else forward["TFLOP/s"]
    work = 2.5 * forward["TFLOP/s"] * forward["ms"]
    return work / (both["ms"] - forward["ms"]) if both else None


def goals(rows: Rows) -> Iterator[tuple[str, int, float, float]]:
    """Yields the goals that were measured: the text, T, TFLOP/s, and the least wanted."""
    ours = functools.partial(rate, rows, by=OURS)
    wanted: list[tuple[str, int, float | None, float | None]] = []
    for length in sorted({key[3] for key in rows if key[:2] == ("none", OURS)}):
        cudnn = rate(rows, "none", "cudnn", FORWARD, length)
        for what, text, least in (
            (FORWARD, "none, forward: 0.9 of cuDNN", cudnn and 0.9 * cudnn),
            (BACKWARD, "none, backward", 400.0),
        ):
            none, t5 = (ours(name=name, what=what, length=length) for name in ("none", "t5"))
            wanted.append((text, length, none, least))
            wanted.append((f"t5, {what}: 0.85 of none", length, t5, none and 0.85 * none))
    pair = ours(name="pair", what=BACKWARD, length=2048)
    wanted.append(("pair, backward: twice tokamax", 2048, pair, 134.0))
    yield from ((text, length, x, least) for text, length, x, least in wanted if x and least)
