"""Claims with criteria that are written before the runs, and the one judge of them.

Criteria and gates are conditions on scores: comparisons, chained as in Python, with numbers and
`+ - * /` on either side. `rope[64]` is the score named rope at length 64 in its main view, and
`rope.ntk[256]` in another; each kind of file says which there are.

A condition has a margin, its left minus its right side, with a 95 % interval: of the margins in
each seed or document, whose scores are paired, or of estimates with errors.
"""

import ast
import dataclasses
import math
import operator
from collections.abc import Callable, Iterable, Iterator

from experiments.errors import ConfigError
from experiments.settings.config_io import strict
from experiments.stats import Bounds, Estimate, interval

HOLDS, FAILS, NOT_RESOLVED = "holds", "fails", "not resolved"
GATE_FAILED, NOT_RUN = "gate failed", "not run"
Score = Callable[[str, str | None, int], float]
"""Returns a score from a name, a view (None: the main one) and a length."""
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
        """Returns left side minus right side, NaN without a score and for a division by 0."""
        left, _, right = self._sides()
        return _value(left, score) - _value(right, score)

    def holds_at(self, margin: float) -> bool:
        return self._sides()[1](margin, 0.0)

    def scores(self) -> Iterator[tuple[str, str | None, int]]:
        for node in ast.walk(ast.parse(self.text, mode="eval")):
            if isinstance(node, ast.Subscript):
                yield _parts(node)

    def _sides(self):
        node = ast.parse(self.text, mode="eval").body
        assert isinstance(node, ast.Compare)
        return node.left, _COMPARE[type(node.ops[0])], node.comparators[0]


@strict
class Claim:
    """A sentence, with conditions that all must hold."""

    claim: str
    """What is claimed, one sentence."""
    criteria: tuple[str, ...]
    """What the claim predicts: conditions, all of which must hold."""
    gate: tuple[str, ...] = ()
    """Conditions without which the claim says nothing."""

    @property
    def gates(self) -> tuple[Condition, ...]:
        return self._parsed("gate")

    @property
    def conditions(self) -> tuple[Condition, ...]:
        return self._parsed("criteria")

    def _parsed(self, name: str) -> tuple[Condition, ...]:
        texts = enumerate(getattr(self, name))
        return tuple(c for i, text in texts for c in parse(text, f"{name}[{i}]"))


@dataclasses.dataclass(frozen=True)
class Margin:
    """The margin of a condition: its mean with an interval, and the margins of units if any."""

    condition: Condition
    bounds: Bounds
    values: tuple[float, ...] = ()

    @property
    def side(self) -> bool | None:
        """Whether the condition holds, or fails, in the whole interval; None if neither."""
        if any(map(math.isnan, self.bounds)):
            return None
        ends = {self.condition.holds_at(bound) for bound in self.bounds[1:]}
        return ends.pop() if len(ends) == 1 else None

    @property
    def held(self) -> int:
        """In how many units the condition holds."""
        return sum(map(self.condition.holds_at, self.values))

    @property
    def opens(self) -> bool:
        """Whether it holds as a gate: in each unit, or in the interval of an estimate."""
        return self.held == len(self.values) if self.values else self.side is True


def paired(condition: Condition, units: Iterable[Score]) -> Margin:
    """Returns the margin of a condition from the scores of seeds or documents.

    A single unit has no interval, which resolves nothing.
    """
    values = tuple(condition.margin(score) for score in units)
    return Margin(condition, interval(values), values)


def estimated(condition: Condition, score: Callable[[str, str | None, int], Estimate]) -> Margin:
    """Returns the margin of a condition from scores whose errors are independent.

    Each score in turn is greater by its error: exact for sums and for products with numbers.

    >>> (half,) = parse("a[2] >= a[1] / 2", "criteria")
    >>> by_length = {1: Estimate(-0.1, 0.01, 30), 2: Estimate(-0.01, 0.015, 30)}
    >>> [round(x, 3) for x in estimated(half, lambda name, view, n: by_length[n]).bounds]
    [0.04, 0.008, 0.072]
    """
    scores = {key: score(*key) for key in condition.scores()}
    means = {key: estimate.mean for key, estimate in scores.items()}

    def margin(over: dict[tuple[str, str | None, int], float]) -> float:
        return condition.margin(lambda *key: (means | over)[key])

    middle = margin({})
    shifts = [margin({key: x.mean + x.error}) - middle for key, x in scores.items()]
    degrees = min(estimate.degrees for estimate in scores.values())
    return Margin(condition, Estimate(middle, math.hypot(*shifts), degrees).bounds)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The outcome of a claim: a word, such as `HOLDS`, and every condition with its margin."""

    claim: Claim
    word: str
    gate: tuple[Margin, ...] = ()
    criteria: tuple[Margin, ...] = ()


def judge(claim: Claim, margin: Callable[[Condition], Margin]) -> Outcome:
    """Returns the outcome of a claim by the margins of its conditions.

    It holds if the whole interval of each criterion is on its side of the threshold, and fails if
    one interval is on the other side; it says nothing unless the gate holds in every unit.
    """
    gate, criteria = (tuple(map(margin, each)) for each in (claim.gates, claim.conditions))
    sides = [each.side for each in criteria]
    word = HOLDS if all(sides) else FAILS if False in sides else NOT_RESOLVED
    opens = all(each.opens for each in gate)
    return Outcome(claim, word if opens else GATE_FAILED, gate, criteria)


def check(claims: Iterable[Claim], known: Callable[[str, str | None, int], str]) -> None:
    """Raises ConfigError for a claim without criteria, or with a score that is not there.

    `known` returns why there is no score of a name, a view and a length, or "".
    """
    for claim in claims:
        if not claim.criteria:
            raise ConfigError("criteria: must hold at least one condition")
        for condition in (*claim.gates, *claim.conditions):
            for key in condition.scores():
                if reason := known(*key):
                    raise ConfigError(f"{condition.text!r}: {reason}")


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
