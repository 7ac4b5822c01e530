"""Forecasts of times from the compiler's schedule, and times that were measured on TPUs.

tokamax (github.com/openxla/tokamax, Apache-2.0) has kernels of splash attention, and commits the
times that it measured on TPUs with the sizes of their tiles. tokamax_times.json has all times of
its forward kernel on v6e and v5p with B * T = 16384 and no bias or softcap, medians of five runs,
and the cycles in the schedule of the same kernel with the same tiles.
`make tpu-static ARGS=--forecast` prints the table of docs/kernels.md from this file.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

PATH = pathlib.Path(__file__).with_name("tokamax_times.json")
CLOCK = 1.75e9
"""Cycles per second of v6e and v5p: peak FLOP/s by the FLOPs of one cycle of the matrix units."""
CORES = {"v6e": 1, "v5p": 2}
BANDWIDTH = {"v6e": 1640e9, "v5p": 2765e9}
"""Bytes per second."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A time of tokamax's forward kernel, T = S and N = K.

    Attributes:
      chip, batch, length, heads, dim, causal: the problem, in bfloat16.
      q, k, compute: queries and keys per tile, and keys per product.
      layouts: of q, k and v, by tokamax's numbers.
      scheduler: whether it uses the compiler's experimental scheduler.
      ms: milliseconds, with the transpositions of q, k, v and the output.
      tiles: cycles of a tile without and with a mask, where these occur.
      rest: cycles of all other regions.
      bytes: read and written by the program, by XLA's count.
    """

    chip: str
    batch: int
    length: int
    heads: int
    dim: int
    causal: bool
    q: int
    k: int
    compute: int
    layouts: tuple[int, int, int]
    scheduler: bool
    ms: float
    tiles: tuple[int, ...] = ()
    rest: int = 0
    bytes: int = 0

    def forecast(self) -> float:
        """Returns milliseconds.

        Cycles of all tiles that are not empty, and of the rest once for each block of queries;
        then the bytes that XLA moves around the kernel, one after the other.
        """
        rows, columns = self.length // self.q, self.length // self.k
        plain, masked = rows * columns, 0
        if self.causal:
            corners = [(i * self.q, j * self.k) for i in range(rows) for j in range(columns)]
            plain = sum(key + self.k - 1 <= first for first, key in corners)
            masked = sum(key < first + self.q for first, key in corners) - plain
        cycles = plain * self.tiles[0] + masked * self.tiles[-1] + rows * self.rest
        cycles *= self.batch * self.heads / CORES[self.chip]
        operand_bytes = 4 * 2 * self.batch * self.length * self.heads * self.dim
        return 1e3 * (cycles / CLOCK + (self.bytes - operand_bytes) / BANDWIDTH[self.chip])


def read() -> list[Measured]:
    return [Measured(**case) for case in json.loads(PATH.read_text())["cases"]]


def write(cases: Iterable[Measured], libtpu: str, tokamax: str) -> None:
    known: dict[str, Any] = json.loads(PATH.read_text())
    known |= {"libtpu": libtpu, "tokamax": tokamax}
    known["cases"] = [dataclasses.asdict(case) for case in cases]
    lines = json.dumps(known).replace('{"chip"', '\n  {"chip"').replace("}]}", "}\n]}")
    PATH.write_text(lines + "\n")


def table() -> str:
    """Returns forecasts, measured times and their ratios as a table of Markdown."""
    cases = {(x.chip, x.dim, x.length, x.causal): x for x in read()}
    columns = [(chip, dim) for chip in CORES for dim in (64, 128, 256)]
    lines = [
        f"| T | | {' | '.join(f'{chip}, H {dim}' for chip, dim in columns)} |",
        f"|---|---|{'---|' * len(columns)}",
    ]
    for length in sorted({x.length for x in cases.values()}):
        for causal in (False, True):
            cells = []
            for column in columns:
                case = cases.get((*column, length, causal))
                forecast = case.forecast() if case else 0.0
                cells.append(
                    f"{forecast:.2f} / {case.ms:.2f} = {forecast / case.ms:.2f}" if case else ""
                )
            mask = "causal" if causal else "full"
            lines.append(f"| {length} | {mask} | {' | '.join(cells)} |")
    return "\n".join(lines)
