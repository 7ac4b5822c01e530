"""Conditions on scores, such as `alibi[1024] - alibi[128] <= 0.02`.

    rope[64]             score of the run named rope at length 64, in the main view of its task
    rope.ntk[256]        the same in another view: a way of evaluating, or a zero-shot variant
    a < b < c            as in Python; arithmetic has + - * / and numbers

A condition is evaluated for every seed on its own: scores of one seed are paired.
"""

import ast
import dataclasses
import math
import operator
from collections.abc import Callable, Iterator

from experiments.errors import ConfigError

Score = Callable[[str, str | None, int], float]
"""Returns a score from the name of a run, a view (None: the main one) and a length."""
_COMPARE: dict[type[ast.cmpop], Callable[[float, float], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: lambda a, b: a / b if b else math.nan,
}


@dataclasses.dataclass(frozen=True)
class Condition:
    """One comparison, as it was written, without the rest of a chain."""

    text: str

    def margin(self, score: Score) -> float:
        """Returns left side minus right side for one seed.

        It is NaN where a score is missing, and where something is divided by 0.
        """
        left, _, right = self._sides()
        return _value(left, score) - _value(right, score)

    def holds(self, score: Score) -> bool:
        """Returns whether the comparison is true for one seed."""
        return self.holds_at(self.margin(score))

    def holds_at(self, margin: float) -> bool:
        """Returns whether the comparison is true of this margin."""
        return self._sides()[1](margin, 0.0)

    def scores(self) -> Iterator[tuple[str, str | None, int]]:
        """Yields every score that the condition names."""
        for node in ast.walk(ast.parse(self.text, mode="eval")):
            if isinstance(node, ast.Subscript):
                yield _parts(node)

    def _sides(self):
        node = ast.parse(self.text, mode="eval").body
        assert isinstance(node, ast.Compare)
        return node.left, _COMPARE[type(node.ops[0])], node.comparators[0]


def parse(text: str, path: str) -> list[Condition]:
    """Returns the comparisons of a condition, several for a chain; `path` is for messages.

    >>> [c.text for c in parse("a[64] < b.ntk[64] < 0.5", "criteria")]
    ['a[64] < b.ntk[64]', 'b.ntk[64] < 0.5']
    """
    try:
        node = ast.parse(text, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):  # A NUL, a deep expression.
        raise ConfigError(f"{path}: is no condition: {text!r:.200}") from None
    if not isinstance(node, ast.Compare) or not all(type(op) in _COMPARE for op in node.ops):
        raise ConfigError(f"{path}: must compare scores by < <= > >=, got {text!r:.200}")
    sides = [node.left, *node.comparators]
    try:
        for side in sides:
            _check(side, path, text)
    except RecursionError:
        raise ConfigError(f"{path}: is nested too deeply") from None
    if not any(isinstance(n, ast.Subscript) for side in sides for n in ast.walk(side)):
        raise ConfigError(f"{path}: names no score, such as rope[64]: {text!r:.200}")
    return [
        Condition(ast.unparse(ast.Compare(sides[i], [op], [sides[i + 1]])))
        for i, op in enumerate(node.ops)
    ]


def _check(node: ast.expr, path: str, text: str) -> None:
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        _check(node.left, path, text)
        _check(node.right, path, text)
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        _check(node.operand, path, text)
    elif isinstance(node, ast.Subscript):
        index, score = node.slice, node.value
        score = score.value if isinstance(score, ast.Attribute) else score
        whole = isinstance(index, ast.Constant) and type(index.value) is int
        if not (whole and isinstance(score, ast.Name)):
            raise ConfigError(
                f"{path}: scores are run[length] or run.view[length], got {text!r:.200}"
            )
    elif not (isinstance(node, ast.Constant) and type(node.value) in (int, float)):
        raise ConfigError(f"{path}: has {ast.unparse(node)!r}, which is no score, in {text!r:.200}")


def _parts(node: ast.Subscript) -> tuple[str, str | None, int]:
    score, view = node.value, None
    if isinstance(score, ast.Attribute):
        score, view = score.value, score.attr
    assert isinstance(score, ast.Name) and isinstance(node.slice, ast.Constant)
    return score.id, view, int(str(node.slice.value))


def _value(node: ast.expr, score: Score) -> float:
    match node:
        case ast.BinOp():
            return _ARITHMETIC[type(node.op)](_value(node.left, score), _value(node.right, score))
        case ast.UnaryOp():
            return -_value(node.operand, score)
        case ast.Subscript():
            return score(*_parts(node))
        case ast.Constant():
            return float(str(node.value))
    raise AssertionError(node)
