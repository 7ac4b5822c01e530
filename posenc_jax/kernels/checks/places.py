"""The first wrong number of a result, in words: its row of the batch, head and tile."""

import dataclasses
from collections.abc import Callable

import jax
import numpy as np

from posenc_jax.kernels.checks.cases import Arrays, Case, Labels

_ELEMENT = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 3e-2}
"""Greatest error of a number, as a part of the largest of its array."""
_FACTOR = {"float32": 1e-4, "float16": 2e-3, "bfloat16": 5e-3}
"""Greatest error of an array as a whole: rounding errors cancel in its projection."""
_FEW = 100
"""Arrays of fewer numbers are allowed three times as much: their errors do not cancel."""


@dataclasses.dataclass(frozen=True)
class Primitive:
    """A part of a kernel that moves integers, which name their place.

    Attributes:
      name: of the part.
      function: of the arguments; it runs a kernel.
      arguments: arrays.
      want: the expected result.
      axes: names of the axes of the result.
    """

    name: str
    function: Callable
    arguments: tuple[np.ndarray, ...]
    want: np.ndarray
    axes: tuple[str, ...]

    def run(self) -> str | None:
        """Returns the first wrong place, or None."""
        got = np.asarray(jax.jit(self.function)(*self.arguments)).astype(np.float64)
        want = self.want.astype(np.float64)
        wrong = got != want
        if not wrong.any():
            return None
        index = tuple(int(n) for n in np.argwhere(wrong)[0])
        where = ", ".join(f"{axis} {n}" for axis, n in zip(self.axes, index, strict=True))
        count = f"{wrong.sum()} of {wrong.size} numbers are wrong"
        return f"{where}: {got[index]:.10g}, expected {want[index]:.10g}; {count}"


def first_wrong(case: Case, got: Arrays, want: Arrays) -> str | None:
    """Returns the first wrong place of the outcome of a case, or None.

    Args:
      case: the problem.
      got: an outcome, as `posenc_jax.kernels.checks.cases.run` returns it.
      want: the expected outcome.
    """
    of_queries, of_keys = case.labels
    got = {name: np.asarray(x, np.float64) for name, x in got.items()}
    for name, labels in (
        ("output", of_keys),
        ("dq", of_keys),
        ("dk", of_queries),
        ("dv", of_queries),
    ):
        if name in got and labels.blocks:
            sums = _sums(name, got, want), _sums(name, want, want)
            place = _wrong_tile(case, name, *sums, labels)
            if place is not None:
                return place
    for name in got:
        place = _wrong_number(case, name, got[name], want[name])
        if place is not None:
            return place
    return None


def wrong_counts(case: Case, got: Arrays, want: Arrays) -> str | None:
    """Returns the first query that sees a wrong number of keys, or None.

    Args:
      case: the problem.
      got, want: as for `first_wrong`, of inputs of zeros, where "lse" is the logarithm of a count.
    """
    a, b = np.exp(np.asarray(got["lse"], np.float64)), np.exp(want["lse"])
    wrong = ~(np.abs(a - b) <= 0.25)
    if not wrong.any():
        return None
    batch, head, query = np.argwhere(wrong)[0]
    tile = query // case.block
    return (
        f"log-sum-exp: batch {batch}, head {head}, tile row {tile}: query {query} sees "
        f"{a[batch, head, query]:.4g} keys, expected {b[batch, head, query]:.4g}"
    )


def other_bits(case: Case, got: Arrays, first: Arrays) -> str | None:
    """Returns the first place where two outcomes of a case have other bits, or None."""
    for name, a in got.items():
        b = np.asarray(first[name])
        bits = np.dtype(f"u{b.dtype.itemsize}")
        other = np.ascontiguousarray(a).view(bits) != np.ascontiguousarray(b).view(bits)
        if other.any():
            index = tuple(int(n) for n in np.argwhere(other)[0])
            where = list(index) if name.startswith("gradient") else _place(case, name, index)
            return f"{name}: other bits at {where}, {other.sum()} of {other.size} numbers"
    return None


def _sums(name: str, x: Arrays, want: Arrays) -> np.ndarray:
    """Returns an array whose labelled channels are sums over tiles.

    Those of the output are weights before the softmax divides them, in units of the expected
    divisor, so that a wrong tile does not change the others.
    """
    if name != "output" or "lse" not in x:
        return x[name]
    with np.errstate(invalid="ignore", over="ignore"):
        factor = np.exp(x["lse"] - want["lse"])
    factor = np.where(np.isneginf(x["lse"]) & np.isneginf(want["lse"]), 1.0, factor)
    return x[name] * factor[..., None]


def _wrong_tile(
    case: Case, name: str, got: np.ndarray, want: np.ndarray, labels: Labels
) -> str | None:
    """Returns the first tile whose sum is wrong, or None."""
    channels, weights = slice(labels.start, labels.stop), name in ("output", "dv")
    got, want = got[..., channels], want[..., channels]
    # Sums of cotangents cancel, sums of weights do not.
    limit = _ELEMENT[case.dtype] * (1 if weights else 2) * max(np.abs(want).max(), 1e-30)
    wrong = ~(np.abs(got - want) <= limit)
    batch, heads, count, _ = got.shape
    rows = -(-count // case.block)
    padding = (0, 0), (0, 0), (0, rows * case.block - count), (0, 0)
    by_row = np.pad(wrong, padding).reshape(batch, heads, rows, case.block, -1).any(3)
    if not by_row.any():
        return None
    b, n, row = np.argwhere(by_row.any(3))[0]
    span = slice(row * case.block, (row + 1) * case.block)
    excess = (got - want)[b, n, span]
    error = np.where(np.isnan(excess), np.inf, np.abs(excess))
    if weights and (excess < -limit).any():  # A missing block comes before the one in its place.
        error = np.where(excess < 0, error, 0.0)
    tiles = by_row[..., : labels.blocks]
    # Blocks come first; if all are right, heads are wrong.
    error = error[:, : labels.blocks] if tiles[b, n, row].any() else error
    token, channel = divmod(int(np.argmax(error)), error.shape[1])
    of_queries = name in ("output", "dq")
    place = [f"tile {'row' if of_queries else 'column'} {row}"]
    if channel < labels.blocks:
        place.append(f"tile {'column' if of_queries else 'row'} {channel}")
        place = place if of_queries else place[::-1]
    text = f"{name}: batch {b}, head {n}, {', '.join(place)}: "
    numbers = got[b, n, span][token, channel], want[b, n, span][token, channel]
    text += "{:.4g}, expected {:.4g} ".format(*numbers)
    text += f"({'query' if of_queries else 'key'} {span.start + token})"
    if weights:
        start = (b * heads + n) * labels.heads // (batch * heads)  # Of several, the first.
        shared = range(start, start + max(1, labels.heads // (batch * heads)))
        text += _read_instead(excess[token], limit, labels, (channel, shared, batch), of_queries)
    rows_or_tiles = tiles if tiles.any() else by_row.any(3)
    noun = "tiles" if tiles.any() else "rows of tiles"
    return f"{text}; {rows_or_tiles.sum()} of {rows_or_tiles.size} {noun} are wrong"


def _read_instead(
    excess: np.ndarray,
    limit: float,
    labels: Labels,
    place: tuple[int, range, int],
    of_queries: bool,
) -> str:
    """Returns the block and the head that were read in place of others, if any were.

    Args:
      excess: of the labelled channels of a token.
      limit: the greatest error that is allowed.
      labels: the channels.
      place: the channel in which something is missing, the heads that were to be read, and B.
      of_queries: whether the token is a query, and labels are of keys.
    """
    excess, parts, (channel, heads, batch) = np.nan_to_num(excess), [], place
    block = int(np.argmax(excess[: labels.blocks]))
    if excess[block] > limit and block != channel:
        parts.append(f"tile {'column' if of_queries else 'row'} {block}")
    other = int(np.argmax(excess[labels.blocks :]))
    if excess[labels.blocks + other] > limit and other not in heads:
        row, head = divmod(other, labels.heads // batch)
        parts.append(f"batch {row}, head {head}")
    return f"; {' of '.join(parts)} was read" if parts else ""


def _wrong_number(case: Case, name: str, got: np.ndarray, want: np.ndarray) -> str | None:
    """Returns the first wrong number of an array, or None."""
    finite = np.isfinite(want)
    size = np.abs(want[finite]).max(initial=0.0)
    per_parameter = name.startswith("gradient")
    # Gradients of parameters are sums over all pairs, which cancel.
    limit = _ELEMENT[case.dtype] * (2 if per_parameter else 1) * max(size, 1e-30)
    with np.errstate(invalid="ignore"):
        right = np.where(finite, np.abs(got - want) <= limit, got == want)
    if not right.all():
        index = tuple(int(n) for n in np.argwhere(~right)[0])
        where = f"{list(index)}" if per_parameter else _place(case, name, index)
        return f"{name}: {where}: {got[index]:.4g}, expected {want[index]:.4g}"
    if not size:
        return None
    got, want = np.where(finite, got, 0.0), np.where(finite, want, 0.0)
    axes = tuple(range(0 if per_parameter else 2, got.ndim))
    square = (want * want).sum(axes)
    factor = (got * want).sum(axes) / np.where(square, square, 1.0)
    few = per_parameter and want.size < _FEW
    wrong = (np.abs(factor - 1) > _FACTOR[case.dtype] * (3 if few else 1)) & (square > 0)
    if not wrong.any():
        return None
    index = tuple(np.argwhere(wrong)[0])
    where = "" if per_parameter else "batch {}, head {}: ".format(*index)
    return f"{name}: {where}{factor[index]:.4f} times what is expected"


def _place(case: Case, name: str, index: tuple[int, ...]) -> str:
    batch, head, token = index[:3]
    of_queries = name in ("output", "lse", "dq")
    tile = f"tile {'row' if of_queries else 'column'} {token // case.block}"
    return f"batch {batch}, head {head}, {tile} ({'query' if of_queries else 'key'} {token})"
