"""Self-Extend against a float64 port of its authors' code."""

import pytest

import posenc_jax as pe
from tests.oracle import matches_products, turned
from tests.support import ROTARY_OPTIONS, Option

_VALUES = ROTARY_OPTIONS | {"window": 9, "group": 3}
OPTIONS = {pe.SelfExtend: {name: Option(value, {"window": 6}) for name, value in _VALUES.items()}}


def self_extend(q, k, i, j, w, group_size_1, group_size_2):
    """datamllab/LongLM, self_extend_patch/Llama.py, self_extend_forward.

    `neighbor_attention_mask` is true for the last `group_size_2` keys of a query.
    """
    if j > i - group_size_2:
        return turned(q, i * w) @ turned(k, j * w)
    group_query = i // group_size_1 + group_size_2 - group_size_2 / group_size_1
    return turned(q, group_query * w) @ turned(k, j // group_size_1 * w)


@pytest.mark.parametrize("window, group, start", [(8, 4, 257), (10, 3, 10**6)])
def test_matches_the_authors_code(window, group, start):
    scheme = pe.SelfExtend(head_dim=12, window=window, group=group)
    matches_products(scheme, lambda *x: self_extend(*x, group, window), start=start)
