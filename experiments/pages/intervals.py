"""Intervals of means over seeds."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import special


def interval(
    values: Sequence[float], shifts: Sequence[float] = (0.0,)
) -> tuple[float, float, float]:
    """Returns the mean and its 95 % interval by Student's t, NaN bounds for one value.

    Args:
      values: one per seed.
      shifts: equally likely changes of the mean for another reason, such as another choice of
        settings; the interval is that of their sum with the t distribution.

    >>> [round(x, 3) for x in interval((1.0, 2.0, 3.0))]
    [2.0, -0.484, 4.484]
    >>> [round(x, 3) for x in interval((1.0, 2.0, 3.0), (0.0, 0.0, 1.0))]
    [2.0, -0.24, 4.939]
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
    low, high = np.quantile(mean + np.add.outer(np.asarray(shifts), quantiles), (0.025, 0.975))
    return mean, float(low), float(high)


def in_words(
    values: Sequence[float], digits: int = 3, sign: str = "", shifts: Sequence[float] = (0.0,)
) -> str:
    """Returns the mean and its interval as text, the mean alone for one value.

    Args:
      values: NaN for seeds that diverged.
      digits: behind the point.
      sign: "+" for differences.
      shifts: as for `interval`.

    >>> in_words((1.0, 2.0, 3.0), sign="+"), in_words([0.5]), in_words((math.nan, 1.0))
    ('+2.000 [-0.484, +4.484]', '0.500', 'diverged in 1 of 2')
    """
    if diverged := sum(map(math.isnan, values)):
        return f"diverged in {diverged} of {len(values)}"
    form = f"{sign}.{digits}f"
    middle, low, high = interval(values, shifts)
    return (
        f"{middle:{form}}" if math.isnan(low) else f"{middle:{form}} [{low:{form}}, {high:{form}}]"
    )
