"""Writes the explorer, one page with sliders for the wavelengths of RoPE.

The page holds numbers of `posenc_jax.rope_frequencies`. With w the frequency of a pair and s the
factor, PI, YaRN and Llama 3 blend w and w / s, and NTK takes a power of s:

    w (keep + (1 - keep) / s)            w s^(-slope)

So the page needs `keep` for each theta and trained length, and `slope` once, but no table over s.
"""

from pathlib import Path
from typing import Any

import numpy as np
from markupsafe import Markup

import posenc_jax as pe
from experiments.pages.page import fill
from experiments.runs.files import to_json

HEAD_DIM = 128
THETAS = [c * 10.0**n for n in range(3, 7) for c in (1, 2, 5)] + [1e7]
LENGTHS = [2**n for n in range(10, 18)]
FACTORS = [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 48.0, 64.0]
# The factors for LLaMA-2-7B at 256k tokens, longrope_scale/ft_la2_256k.csv of microsoft/LongRoPE.
LONG_FACTORS = (
    *(1.02, 1.03, 1.05, 1.05, 1.05, 1.05, 1.07, 1.09, 1.1, 1.12, 1.12, 1.18, 1.34),
    *(1.42, 3.07, 3.91, 4.81, 11.31, 11.59, 12.05, 12.59, 14.75, 15.35, 15.78, 16.71, 17.78),
    *(17.92, 19.65, 20.65, 24.23, 26.85, 27.26, 30.53, 31.23, 33.08, 33.49, 33.93, 36.33, 42.14),
    *(42.62, 43.38, 43.43, 43.97, 55.76, 57.31, 59.34, 59.54, 60.9, 60.95, 60.98, 60.98, 61.63),
    *(62.23, 62.36, 62.93, 62.99, 63.7, 63.8, 64.0, 64.29, 64.34, 64.48, 64.49, 64.77),
)
LONGROPE = pe.LongRoPE(
    short_factor=(1.0,) * 64,
    long_factor=LONG_FACTORS,
    factor=64.0,
    original_max_position=4096,
    long=True,
)


def render() -> str:
    template = Path(__file__).with_name("explorer.html.jinja")
    data = to_json(numbers(), separators=(",", ":"))
    return fill(template, data=Markup(data), version=pe.__version__)


def numbers() -> dict[str, Any]:
    """Returns the numbers of the page; lists are by theta, by trained length and by pair."""
    plain = [pe.rope_frequencies(HEAD_DIM, theta)[0] for theta in THETAS]
    wide, _ = pe.rope_frequencies(HEAD_DIM, 1e4, pe.NTK(2.0))
    slope = -np.log2(wide / pe.rope_frequencies(HEAD_DIM, 1e4)[0])
    long, long_scale = pe.rope_frequencies(HEAD_DIM, 1e4, LONGROPE)
    yarn = [pe.rope_frequencies(HEAD_DIM, 1e4, pe.YaRN(s, 4096))[1] for s in FACTORS]
    return {
        "thetas": THETAS,
        "lengths": LENGTHS,
        "factors": FACTORS,
        "frequencies": [list(w) for w in plain],
        "keep": {"yarn": _keep(pe.YaRN), "llama3": _keep(pe.Llama3)},
        "slope": list(slope),
        "scale": {"yarn": yarn, "longrope": long_scale},
        "longrope": list(long),
    }


def _keep(scaling) -> list[list[list[float]]]:
    """Returns the share of each frequency that a map keeps, which is 0 for a map to w / s."""
    table = []
    for theta in THETAS:
        plain, _ = pe.rope_frequencies(HEAD_DIM, theta)
        maps = [scaling(2.0, length) for length in LENGTHS]
        scaled = [pe.rope_frequencies(HEAD_DIM, theta, m)[0] for m in maps]
        table.append([[round(float(x), 12) for x in 2 * w / plain - 1] for w in scaled])
    return table
