"""CAPE and PoSE: bounds, and lines of PoSE's code; tests/positions/test_random.py has the rest."""

import jax
import numpy as np

from posenc_jax import contrib
from posenc_jax import positions as pos
from tests.positions.test_random import KEY, PACKED, PLACES, parts
from tests.support import slow


@slow
def test_continuous_draws_cover_their_bounds():
    keys, positions = jax.random.split(KEY, 2000), pos.count_up(1, 3, 100)

    none = {"global_shift": 0.0, "local_shift": 0.0, "max_scaling": 1.0}
    changes = {}, {"global_shift": 5.0}, {"local_shift": 0.5}, {"max_scaling": 1.03}

    def draw(key):
        return [contrib.continuous(key, positions, **(none | options))[0] for options in changes]

    still, moved, jitter, stretch = map(np.asarray, jax.jit(jax.vmap(draw))(keys))
    np.testing.assert_array_equal(still, np.tile(positions, (2000, 1)))
    moved, jitter = (x - np.asarray(positions) for x in (moved, jitter))
    assert np.ptp(moved, axis=1).max() < 1e-4 and abs(moved.mean()) < 0.3
    assert 4.9 < moved.max() <= 5 and -5 <= moved.min() < -4.9
    assert 0.49 < jitter.max() <= 0.5 + 1e-5 and abs(np.corrcoef(jitter.T)[0, 1]) < 0.1
    stretch = stretch / np.asarray(positions)
    assert np.ptp(stretch, axis=1).max() < 1e-5
    assert 1.029 < stretch.max() <= 1.03 + 1e-5 and 1 / 1.03 - 1e-5 <= stretch.min() < 0.972


def pose(length, rt1, rt):
    """dwzhu-pku/PoSE, train_preprocess_function_pose at 43b43b3: lt is 0."""
    ids = np.arange(length)
    ids[rt1:] += rt
    return ids


def test_gaps_match_the_authors():
    np.testing.assert_array_equal(pose(8, 3, 20), [0, 1, 2, 23, 24, 25, 26, 27])
    cuts, gaps = set(), set()
    keys = jax.random.split(KEY, 400)
    draw = jax.vmap(lambda k: contrib.skip_wise(k, PLACES, 30, segment_ids=PACKED))
    outs = jax.jit(draw)(keys)
    for out in np.asarray(outs):
        for part in parts(out):
            gap = int((part - np.arange(len(part)))[-1])
            jumps = np.flatnonzero(np.diff(part) > 1)
            cut = int(jumps[0]) + 1 if len(jumps) else 1
            np.testing.assert_array_equal(part, pose(len(part), cut, gap))
            if len(part) == 11:
                cuts.add(cut)
                gaps.add(gap)
    assert cuts == set(range(1, 7)) and gaps == set(range(20))
