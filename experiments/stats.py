"""Means, intervals and tests of scores, and their words; a score that is missing is NaN."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from scipy import special

Bounds = tuple[float, float, float]
"""A mean, and the lower and the upper bound of its 95 % interval."""


def ordered(items: Iterable) -> list:
    """Returns the distinct items in order of first appearance."""
    return list(dict.fromkeys(items))


def mean(values: Iterable[float | None]) -> float:
    """Returns the mean; NaN for no values, or if one is not finite.

    >>> mean([1, 2]), mean([])
    (1.5, nan)
    """
    numbers = [math.nan if x is None or not math.isfinite(x) else float(x) for x in values]
    # The last digit of `sum` depends on the version of Python, and pages are compared by bytes.
    return math.fsum(numbers) / len(numbers) if numbers else math.nan


def interval(values: Sequence[float], shifts: Sequence[float] = (0.0,)) -> Bounds:
    """Returns the mean and its 95 % interval by Student's t, NaN bounds for one value.

    Args:
      values: one per seed.
      shifts: equally likely changes of the mean for another reason, such as another choice of
        settings; the interval is of their sum with the t distribution.

    >>> [round(x, 3) for x in interval((1.0, 2.0, 3.0))]
    [2.0, -0.484, 4.484]
    >>> [round(x, 3) for x in interval((1.0, 2.0, 3.0), (0.0, 0.0, 1.0))]
    [2.0, -0.25, 4.945]
    """
    x = np.asarray(values)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2:
        return mean, math.nan, math.nan
    # `scipy.special` is imported in a quarter of the time of `scipy.stats`.
    error, degrees = float(x.std(ddof=1)) / len(x) ** 0.5, len(x) - 1
    if not np.any(shifts):
        half = float(special.stdtrit(degrees, 0.975)) * error
        return mean, mean - half, mean + half
    quantiles = special.stdtrit(degrees, (np.arange(2000) + 0.5) / 2000) * error
    sums = mean + np.add.outer(np.asarray(shifts), quantiles)
    # Hazen: the i-th of n sorted sums is the quantile (i - 0.5) / n, as the grid above has it.
    low, high = np.quantile(sums, (0.025, 0.975), method="hazen")
    return mean, float(low), float(high)


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A mean with its standard error.

    >>> str(Estimate(-0.1, 0.01, 30))
    '-0.100 [-0.120, -0.080]'
    """

    mean: float
    error: float
    degrees: float

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval by Student's t."""
        return float(special.stdtrit(self.degrees, 0.975)) * self.error

    @property
    def bounds(self) -> Bounds:
        return self.mean, self.mean - self.half, self.mean + self.half

    def __str__(self) -> str:
        return signed(self.bounds)


def signed(bounds: Bounds) -> str:
    """Returns a mean and its interval with signs, the mean alone where there is no interval.

    >>> signed((0.5, math.nan, math.nan))
    '+0.500'
    """
    return ("{:+.3f}" if math.isnan(bounds[1]) else "{:+.3f} [{:+.3f}, {:+.3f}]").format(*bounds)


def sign(difference: Bounds) -> int:
    """Returns the sign of a resolved difference, 0 of one whose interval holds 0."""
    _, low, high = difference
    return (low > 0) - (high < 0)


def in_cell(values: Sequence[float | None], form: str = ".3f") -> str:
    """Returns the mean as text, or in how many seeds there is no finite score; "" for no seeds.

    >>> in_cell([1, 2]), in_cell([1, None]), in_cell([])
    ('1.500', 'no finite score in 1 of 2', '')
    """
    if not values:
        return ""
    lacking = sum(x is None or not math.isfinite(x) for x in values)
    return f"no finite score in {lacking} of {len(values)}" if lacking else f"{mean(values):{form}}"


def in_words(
    values: Sequence[float], digits: int = 3, sign: str = "", shifts: Sequence[float] = (0.0,)
) -> str:
    """Returns the mean and its interval as text, the mean alone for one value.

    `values` has NaN for seeds without a finite score, and `shifts` are as for `interval`.

    >>> in_words((1.0, 2.0, 3.0), sign="+"), in_words([0.5]), in_words((math.nan, 1.0))
    ('+2.000 [-0.484, +4.484]', '0.500', 'no finite score in 1 of 2')
    """
    form = f"{sign}.{digits}f"
    middle, low, high = interval(values, shifts)
    if math.isnan(low):
        return in_cell(values, form)
    return f"{middle:{form}} [{low:{form}}, {high:{form}}]"


def plus_minus(values: Sequence[float], sign: str = "+", digits: int = 3) -> str:
    """Returns a mean with half the width of its 95 % interval.

    >>> plus_minus([1.0, 2.0, 3.0]), plus_minus([0.5]), plus_minus([])
    ('+2.000 ± 2.484', '+0.500', '')
    """
    if not values:
        return ""
    middle, low, _ = interval(values)
    text = f"{middle:{sign}.{digits}f}"
    return text if math.isnan(low) else f"{text} ± {middle - low:.{digits}f}"


def t_tests(
    scores: Mapping[str, Sequence[float]], reference: Sequence[float]
) -> tuple[dict[str, float], float]:
    """Returns two-sided p values of differences to a reference, and the standard deviation.

    >>> t_tests({"a": [1.0, 1.0], "b": [0.5, 0.5]}, [1.0, 1.0])
    ({}, 0.0)

    `scores` are of each scheme, one per seed. The deviation is pooled over schemes, and NaN for one
    seed per scheme. There are no p values then, nor where it is zero, nor for a reference without
    all scores.
    """
    degrees = sum(len(x) - 1 for x in scores.values())
    if degrees < 1:
        return {}, math.nan
    squares = sum(float(np.var(x)) * len(x) for x in scores.values())
    spread, p_values = (squares / degrees) ** 0.5, {}
    # Without a spread all seeds agree, as at the ceiling of a task.
    if not spread or math.isnan(mean(reference)):
        return {}, spread
    for scheme, x in scores.items():
        error = spread * (1 / len(x) + 1 / len(reference)) ** 0.5
        t = abs(float(np.mean(x)) - float(np.mean(reference))) / error
        p_values[scheme] = 2 * float(special.stdtr(degrees, -t))
    return p_values, spread


def holm(p_values: Mapping[str, float], level: float = 0.05) -> set[str]:
    """Returns the tests that Holm's correction for their number rejects.

    >>> sorted(holm({"a": 0.01, "b": 0.04, "c": 0.02, "d": 0.6}))
    ['a']
    >>> sorted(holm({"a": 0.01, "b": 0.02, "c": 0.03}))
    ['a', 'b', 'c']
    """
    rejected: set[str] = set()
    for name in sorted(p_values, key=lambda name: p_values[name]):
        if p_values[name] > level / (len(p_values) - len(rejected)):
            break
        rejected.add(name)
    return rejected
