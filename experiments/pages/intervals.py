"""Intervals of means over seeds."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean and its 95 % interval by Student's t, NaN bounds for one value.

    >>> [round(x, 3) for x in interval((1.0, 2.0, 3.0))]
    [2.0, -0.484, 4.484]
    """
    x = np.asarray(values)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2:
        return mean, math.nan, math.nan
    # Imported in a quarter of the time of `scipy.stats`.
    half = float(special.stdtrit(len(x) - 1, 0.975) * x.std(ddof=1) / len(x) ** 0.5)
    return mean, mean - half, mean + half


def in_words(values: Sequence[float], digits: int = 3, sign: str = "") -> str:
    """Returns the mean and its interval as text, the mean alone for one value.

    Args:
      values: NaN for seeds that diverged.
      digits: behind the point.
      sign: "+" for differences.

    >>> in_words((1.0, 2.0, 3.0), sign="+"), in_words([0.5]), in_words((math.nan, 1.0))
    ('+2.000 [-0.484, +4.484]', '0.500', 'diverged in 1 of 2')
    """
    if diverged := sum(map(math.isnan, values)):
        return f"diverged in {diverged} of {len(values)}"
    form = f"{sign}.{digits}f"
    middle, low, high = interval(values)
    return (
        f"{middle:{form}}" if math.isnan(low) else f"{middle:{form}} [{low:{form}}, {high:{form}}]"
    )
