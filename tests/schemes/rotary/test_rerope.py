"""ReRoPE, Leaky ReRoPE and STRING against float64 ports of their authors' code."""

import pytest

import posenc_jax as pe
from tests.oracle import matches_products, turned
from tests.support import ROTARY_OPTIONS, Option

_NEAR = {"window": 6}
OPTIONS = {
    pe.ReRoPE: {name: Option(value, _NEAR) for name, value in ROTARY_OPTIONS.items()}
    | {
        "window": Option(9, _NEAR),
        "leak": Option(0.5, _NEAR),
        "restart": Option(9, {"window": 6, "leak": 0.5}),
    }
}


def rerope(q, k, i, j, w, window):
    """bojone/rerope, rerope_patch.py: `attn_weights1`, `attn_weights2`, `rectified_mask`."""
    if abs(i - j) < window:
        return turned(q, i * w) @ turned(k, j * w)
    return turned(q, window * w) @ k


def leaky(q, k, i, j, w, window, s):
    """bojone/rerope, leaky_rerope_patch.py; `rotary_emb2` divides positions by s."""
    if abs(i - j) < window:
        return turned(q, i * w) @ turned(k, j * w)
    offset = window * (s - 1)
    return turned(q, (i + offset) / s * w) @ turned(k, j / s * w)


def string(q, k, i, j, w, diag_size, local_window):
    """HKUNLP/STRING, string_for_llama.py, as its decode step has it."""
    if j > i - diag_size:
        return turned(q, i * w) @ turned(k, j * w)
    return turned(q, (i - diag_size + local_window) * w) @ turned(k, j * w)


@pytest.mark.parametrize(
    "settings, port, options, start",
    [
        ({"window": 7}, rerope, (7,), 0),
        ({"window": 7, "leak": 1 / 16}, leaky, (7, 16), 257),
        ({"window": 10, "leak": 1 / 3}, leaky, (10, 3), 10**6),
        ({"window": 21, "leak": 1.0, "restart": 5}, string, (21, 5), 0),
    ],
)
def test_matches_the_authors_code(settings, port, options, start):
    scheme = pe.ReRoPE(head_dim=12, **settings)
    sizes = {"heads": 12, "kv_heads": 12} if start == 257 else {}
    matches_products(scheme, lambda *x: port(*x, *options), start=start, **sizes)


ERRORS = [
    (pe.ReRoPE, {"leak": 2.0}, "leak must be from 0 to 1, got 2.0"),
    (pe.ReRoPE, {"restart": -1}, "restart must be >= 0, got -1"),
    (pe.ReRoPE, {"window": 4.5}, "window must be an integer, got 4.5", TypeError),
]
