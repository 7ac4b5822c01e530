"""Forecasts of times from the compiler's schedule, and times that were measured on TPUs.

tokamax (github.com/openxla/tokamax, Apache-2.0) has kernels of splash attention, and commits the
times that it measured on TPUs with the sizes of their tiles. tokamax_times.json has times of its
forward kernel on v6e, v5p and 7x, and of its backward kernel on 7x with H = 128, with B * T = 16384
and no bias or softcap, medians of five runs, and the cycles in the schedule of the same kernel with
the same tiles. `make tpu-static ARGS=--forecast` prints the tables of docs/kernels.md from it.
"""

import dataclasses
import json
import pathlib
from collections.abc import Iterable
from typing import Any

PATH = pathlib.Path(__file__).with_name("tokamax_times.json")
CLOCK = {"v6e": 1.75e9, "v5p": 1.75e9, "7x": 2.2e9}
"""Cycles per second: peak FLOP/s by the FLOPs of one cycle of the matrix units.

7x: half of a chip's 2307 TFLOP/s (docs.cloud.google.com/tpu/docs/tpu7x) is of a core, whose units
do 262,144 products per cycle: a kernel that only multiplies two arrays [1024, 1024] takes 4385
cycles, and 4399 on v6e, which has as many.
"""
CORES = {"v6e": 1, "v5p": 2, "7x": 1}
"""Cores of a JAX device, which share its work. A chip of 7x is two devices."""
BANDWIDTH = {"v6e": 1640e9, "v5p": 2765e9, "7x": 7380e9 / 2}
"""Bytes per second of a JAX device."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A time of tokamax's forward or backward kernel, T = S and N = K.

    Attributes:
      chip, batch, length, heads, dim, causal: the problem, in bfloat16.
      q, k, compute: queries and keys per tile, and keys per product.
      layouts: of q, k and v, by tokamax's numbers.
      scheduler: whether it uses the compiler's experimental scheduler.
      ms: milliseconds, with the transpositions of inputs and outputs.
      tiles: cycles of a tile without and with a mask, where these occur.
      rest: cycles of all other regions.
      bytes: read and written by the program, by XLA's count.
      backward: whether the time is of the backward pass, from residuals to dq, dk and dv.
      step: cycles of a step of the backward kernel whose tile is empty; part of `rest`.
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
    backward: bool = False
    step: int = 0

    def forecast(self) -> float:
        """Returns milliseconds.

        Cycles of all tiles that are not empty, and of the rest once for each block of queries;
        then the bytes that XLA moves around the kernel, one after the other. The backward kernel
        takes a step for each tile, empty or not, and all else once for each block of keys. It
        writes one dq for each block of keys; XLA adds them.
        """
        rows, columns = self.length // self.q, self.length // self.k
        plain, masked = rows * columns, 0
        if self.causal:
            corners = [(i * self.q, j * self.k) for i in range(rows) for j in range(columns)]
            plain = sum(key + self.k - 1 <= first for first, key in corners)
            masked = sum(key < first + self.q for first, key in corners) - plain
        cycles = plain * self.tiles[0] + masked * self.tiles[-1]
        tokens = self.batch * self.length * self.heads
        if self.backward:
            cycles += rows * columns * self.step + columns * (self.rest - self.step)
            # A dq for each block of keys, float32 beyond four; q, k, v, d_out, dk and dv; and eight
            # sublanes of the log-sum-exp and of delta.
            dq_bytes = columns * (2 if columns <= 4 else 4)
            operand_bytes = tokens * (self.dim * (dq_bytes + 6 * 2) + 2 * 8 * 4)
        else:
            cycles += rows * self.rest
            operand_bytes = tokens * self.dim * 4 * 2
        cycles *= self.batch * self.heads / CORES[self.chip]
        moved = (self.bytes - operand_bytes) / BANDWIDTH[self.chip]
        return 1e3 * (cycles / CLOCK[self.chip] + moved)


def read() -> list[Measured]:
    return [Measured(**case) for case in json.loads(PATH.read_text())["cases"]]


def write(cases: Iterable[Measured], libtpu: str, tokamax: str) -> None:
    known: dict[str, Any] = json.loads(PATH.read_text())
    known |= {"libtpu": libtpu, "tokamax": tokamax}
    default = {x.name: x.default for x in dataclasses.fields(Measured)}
    known["cases"] = [
        {n: x for n, x in dataclasses.asdict(case).items() if x != default[n]} for case in cases
    ]
    lines = json.dumps(known).replace('{"chip"', '\n  {"chip"').replace("}]}", "}\n]}")
    PATH.write_text(lines + "\n")


def table() -> str:
    """Returns forecasts, measured times and their ratios as two tables of Markdown."""
    cases = {(x.chip, x.backward, x.dim, x.length, x.causal): x for x in read()}
    tables = []
    for chips in (("v6e", "v5p"), ("7x",)):
        columns = list(dict.fromkeys(key[:3] for key in cases if key[0] in chips))
        names = [f"{chip}{' backward' * back}, H {dim}" for chip, back, dim in columns]
        lines = [f"| T | | {' | '.join(names)} |", f"|---|---|{'---|' * len(columns)}"]
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
        tables.append("\n".join(lines))
    return "\n\n".join(tables)
