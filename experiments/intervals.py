"""Intervals of means over seeds."""

import math
from collections.abc import Sequence

import numpy as np
from scipy import stats


def interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Returns the mean and its 95 % interval by Student's t, NaN bounds for one value.

    >>> [round(x, 3) for x in interval((1.0, 2.0, 3.0))]
    [2.0, -0.484, 4.484]
    """
    x = np.asarray(values)
    mean = float(x.mean()) if len(x) else math.nan
    if len(x) < 2:
        return mean, math.nan, math.nan
    half = float(stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / len(x) ** 0.5)
    return mean, mean - half, mean + half
