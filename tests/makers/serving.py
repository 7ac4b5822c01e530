"""Writes docs/decoding.csv: every scheme in every kind of cache, as a server uses it.

An error is the largest difference between a decoded output and one pass over the same tokens.

    python -m tests.makers serving         write the whole table
    python -m tests.makers serving fox t5  write these rows only
"""

import collections
import csv
import pathlib
from typing import Any

import jax
import numpy as np

import posenc_jax as pe
from posenc_jax import testing
from tests.support import SIZES, build

TABLE = pathlib.Path(__file__).parents[2] / "docs" / "decoding.csv"
ROWS, LONGEST, WINDOW, SINKS, BACK = 3, 136, 8, 2, 7
VOCABULARY = np.random.default_rng(0).normal(size=(64, SIZES["model_dim"])).astype(np.float32)
OPTIONS = {
    "swin": {"window": (16, 16)},
    "swin_v2": {"window": (16, 16), "width": 16},
    # Far keys are within the rows.
    "dual_chunk": {"chunk": 6, "local": 2},
    "rerope": {"window": 3},
    "self_extend": {"window": 4, "group": 2},
}
POLICIES = {"full": {}, "ring": {"ring": True}, "sinks": {"ring": True}}
METHODS = "reset", "take", "insert", "rewind"
CHANGES = {name: testing.jit_fast(getattr(pe.KVCache, name)) for name in METHODS}
Row = list[tuple[int, int, int] | None]  # Token, position and segment; None is padding.


class Model:
    """Embedding, projections and attention of 6 heads and 3 key heads, without or with a cache."""

    def __init__(self, scheme: pe.Scheme, **policy: Any):
        self.case = testing.Case(scheme, **{n: SIZES[n] for n in ("num_heads", "head_dim")})
        self.scheme, self.policy = scheme, policy
        self.window = WINDOW if policy.get("ring") else None
        self.traces = collections.Counter()
        self._jitted = testing.jit_fast(self._call, donate_argnums=0)

    def _call(self, cache, params, weights, x, **tokens):
        self.traces[x.shape, cache and cache.positions.shape] += 1
        options = {"window": self.window, "implementation": None if cache else "reference"}
        return self.case.model(self.scheme, params, weights, x, cache=cache, **tokens, **options)

    def __call__(self, cache: pe.KVCache | None, rows: list[Row]):
        """Returns outputs [B, T, N, H] and the cache."""
        numbers = np.array([[t or (0, 0, -1) for t in row] for row in rows], np.int32)
        tokens, positions, segments = np.moveaxis(numbers, -1, 0)
        x, case = VOCABULARY[tokens], self.case
        segmentation = {"positions": positions, "segment_ids": segments}
        out, cache = self._jitted(cache, case.params, case.weights, x, **segmentation)
        return np.asarray(out), cache

    def empty(self, chunk: int) -> pe.KVCache:
        """Returns an empty cache for `chunk` tokens at a time."""
        sinks = self.scheme.traits.num_sink_tokens
        return pe.new_cache(
            self.scheme,
            ROWS,
            sinks + self.window - 1 + chunk if self.window else LONGEST,
            num_heads=self.case.num_heads,
            num_kv_heads=self.case.num_kv_heads,
            head_dim=self.case.head_dim,
            model_dim=self.case.model_dim,
            max_rewind=BACK,
            **self.policy,
        )


class Server:
    """A cache, and for each row the list of its tokens."""

    def __init__(self, model: Model, chunk: int):
        self.model, self.chunk, self.cache = model, chunk, model.empty(chunk)
        self.rows: list[Row] = [[] for _ in range(ROWS)]
        self.outs = [{} for _ in range(ROWS)]
        self.error = 0.0

    def add(self, *new: Row) -> None:
        """Appends tokens to each row, `chunk` at a time at most; short rows are padded."""
        new = [*new, *[[]] * (ROWS - len(new))]
        while any(new):
            now = [row[: self.chunk] + [None] * (self.chunk - len(row)) for row in new]
            new = [row[self.chunk :] for row in new]
            out, self.cache = self.model(self.cache, now)
            for row, outs, tokens, outputs in zip(self.rows, self.outs, now, out, strict=True):
                for token, output in zip(tokens, outputs, strict=True):
                    if token is not None:
                        outs[len(row)] = output
                        row.append(token)

    def check(self) -> float:
        whole, _ = self.model(None, [row + [None] * (LONGEST - len(row)) for row in self.rows])
        for outs, row in zip(self.outs, whole, strict=True):
            errors = [np.abs(out - row[t]).max() for t, out in outs.items()]
            self.error = float(np.max([self.error, *errors]))  # NaN where there is one.
            outs.clear()
        return self.error

    def change(self, name: str, *arguments, rows: list[Row]) -> None:
        """Calls a method of the cache, which should then hold `rows`."""
        self.check()
        self.cache = CHANGES[name](self.cache, *arguments)
        self.rows = [list(row) for row in rows]


def text(length: int, seed: int, segment: int = 0) -> Row:
    numbers = np.random.default_rng(seed).integers(0, len(VOCABULARY), length)
    return [(int(n), t, segment) for t, n in enumerate(numbers)]


def chunks(length: int):
    """Returns the situation of rows that begin together."""
    return lambda server: server.add(*(text(length - row, row) for row in range(ROWS)))


def left_padding(server: Server) -> None:
    server.add(*([None] * pad + text(21 - pad, pad) for pad in (0, 3, 9)))


def packed(server: Server) -> None:
    server.add(
        text(9, 1) + text(17, 2, 1), text(3, 3) + text(4, 4, 1) + text(12, 5, 2), text(20, 6)
    )


def lengths_differ(server: Server) -> None:
    rows = [text(30, row) for row in range(ROWS)]
    for parts in ((7, 3, 0), (1, 0, 5), (0, 7, 1), (7, 7, 7), (1, 1, 0)):
        done = [len(row) for row in server.rows]
        server.add(*(row[n : n + m] for row, n, m in zip(rows, done, parts, strict=True)))


def reused(server: Server) -> None:
    server.add(text(16, 1), text(9, 2), text(3, 3))
    server.change("reset", np.array([True, False, True]), rows=[[], server.rows[1], []])
    more = [(n, t + 9, 0) for n, t, _ in text(9, 5)]
    server.add(text(19, 4), more, text(5, 6))


def inserted(server: Server) -> None:
    model, prompt = server.model, text(7, 4)
    server.add(text(16, 1), text(9, 2))
    _, other = model(model.empty(7), [prompt, [None] * 7, [None] * 7])
    rows = np.array([1, ROWS, ROWS])  # There is no row 3, so the others are left out.
    server.change("insert", rows, other, rows=[server.rows[0], prompt, []])
    server.add([(3, 16, 0)], [(n, t + 7, 0) for n, t, _ in text(12, 5)], text(4, 6))


def beams(server: Server) -> None:
    server.add(text(12, 1), text(9, 2), text(5, 3))
    server.change("take", np.array([1, 1, 0]), rows=[server.rows[n] for n in (1, 1, 0)])
    server.add(*([(n, t + len(row), 0) for n, t, _ in text(9, 7)] for row in server.rows))


def rewound(server: Server) -> None:
    server.add(text(14, 1), text(12, 2), text(7, 3))
    counts = (2, 0, 7)
    rows = [row[: len(row) - n] for row, n in zip(server.rows, counts, strict=True)]
    server.change("rewind", np.array(counts), rows=rows)
    server.add(*([(n, t + len(row), 0) for n, t, _ in text(9, 8)] for row in rows))


SITUATIONS = {
    "chunks of 1": (1, chunks(24)),
    "chunks of 7": (7, chunks(28)),
    "chunks of 64": (64, chunks(130)),
    "left padding": (7, left_padding),
    "packed": (7, packed),
    "rows of different lengths": (7, lengths_differ),
    "rows reused": (7, reused),
    "rows inserted": (7, inserted),
    "beams": (7, beams),
    "rewound": (7, rewound),
}
"""How many tokens are added at a time, and what happens to a server."""


def measure(scheme: pe.Scheme, policy: str, only: tuple[str, ...] = ()) -> dict[str, float]:
    """Returns the largest error of each situation.

    Raises:
      ValueError, NotImplementedError: for a scheme that does not support this kind of cache.
      AssertionError: if a step was traced more than once.
    """
    scheme = pe.streaming(scheme, SINKS) if policy == "sinks" else scheme
    model = Model(scheme, **POLICIES[policy])
    # The reserved slots hold the sink tokens of one sequence.
    skipped = ("packed",) if policy == "sinks" else ()
    names = [n for n in only or SITUATIONS if n not in skipped]
    errors = {}
    for name in names:
        chunk, happen = SITUATIONS[name]
        server = Server(model, chunk)
        happen(server)
        errors[name] = server.check()
    assert set(model.traces.values()) == {1}, f"traces by shape: {model.traces}"
    return errors


def scheme_of(name: str) -> pe.Scheme:
    """Returns a scheme whose tables hold all positions."""
    cls, options = pe.SCHEMES[name], OPTIONS.get(name, {})
    with_table = {"max_length": 256} if "max_length" in cls.__dataclass_fields__ else {}
    return build(cls, **options).replace(**with_table)


def cell(name: str, policy: str) -> str:
    """Returns the largest error of a scheme in a kind of cache, or "raises"; prints all errors."""
    try:
        errors = measure(scheme_of(name), policy)
    except (ValueError, NotImplementedError) as error:
        print(f"{name}, {policy}: raises {error}", flush=True)
        return "raises"
    numbers = ", ".join(f"{situation} {error:.0e}" for situation, error in errors.items())
    print(f"{name}, {policy}: {numbers}", flush=True)
    return f"{max(errors.values()):.0e}".replace("e-0", "e-")


def main(argv: list[str]):
    """Writes rows of the table."""
    for name in argv or pe.SCHEMES:
        write({name: [cell(name, policy) for policy in POLICIES]})
        jax.clear_caches()


def table() -> dict[str, list[str]]:
    """Returns the cells of the table by the name of the scheme."""
    with TABLE.open(newline="") as file:
        return {name: cells for name, *cells in [*csv.reader(file)][1:]}


def write(new: dict[str, list[str]]) -> None:
    """Replaces these rows of the table."""
    rows = table() | new
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("scheme", *POLICIES))
        writer.writerows((name, *rows[name]) for name in pe.SCHEMES if name in rows)
