"""The tables of what `accelerator` measured, a part of docs/gpu.md: writes FOLDER/page.md.

Use: python3 -m experiments.bench.accelerator_page FOLDER
"""

import json
import sys
from pathlib import Path
from typing import Any

from experiments.runs.files import write_whole

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


def read(folder: Path) -> tuple[Rows, dict[str, dict[str, float]]]:
    """Returns the times of a folder, and milliseconds of training steps by size and scheme."""
    names = "train", "times", "torch", "clock"
    train, times, torch, clock = (_json(folder / f"{x}.json") for x in names)
    rows = [*train.get("times", ()), *times.get("times", ()), *torch.get("rows", ())]
    rows = [row for row in rows if "ms" in row]
    return {(x["name"], x["by"], x["what"], x["T"]): x for x in rows}, clock.get("steps", {})


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write(folder: Path) -> str:
    """Writes the tables of a folder of results into its page.md, and returns them."""
    page = tables(folder)
    write_whole(folder / "page.md", page + "\n")
    return page


def tables(folder: Path) -> str:
    """Returns the tables of a folder of results, in Markdown."""
    rows, steps = read(folder)
    parts = _times(rows), _steps(steps)
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


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
