"""Partial Key Offset against modded-nanogpt's attention, and where it differs on purpose."""

import numpy as np
import pytest

import posenc_jax as pe
from tests import oracle
from tests.oracle import qkv, softmax_attention
from tests.support import close, golden, parameters

OPTIONS = {pe.PartialKeyOffset: {"start": 3}}

GOLDEN = golden("partial_key_offset")
H = 8
# Their frequencies reach 1 / 1024, so the base of RoPE's is another.
ROPE = pe.RoPE(H, theta=1024.0**2, layout="interleaved_negative", rotary_dim=H // 2)
BOTH = pe.chain(ROPE, pe.PartialKeyOffset(H))
Q, K, V = (np.asarray(GOLDEN[name], np.float32)[None] for name in "qkv")
SPLIT = 7
SEGMENTS = np.repeat([0, 1], [SPLIT, Q.shape[1] - SPLIT])[None].astype(np.int32)


def shifted(k, starts, start=H // 2):
    """Keys [B, T, K, H] as a loop shifts them; tokens of `starts` keep theirs."""
    out = np.array(k)
    for t in range(1, k.shape[1]):
        if t not in starts:
            out[:, t, :, start:] = k[:, t - 1, :, start:]
    return out


def attend(scheme, q, k, v, **options):
    options |= {"is_causal": True, "scale": GOLDEN["scale"]}
    return oracle.attend(scheme, parameters(scheme), q, k, v, **options)


def test_one_document_matches_modded_nanogpt():
    close(attend(BOTH, Q, K, V)[0], GOLDEN["out"], 1e-6)


def test_packed_documents_match_but_for_the_leak():
    positions = np.arange(Q.shape[1], dtype=np.int32)[None]
    options = {"positions": positions, "segment_ids": SEGMENTS}
    out = attend(BOTH, Q, K, V, **options)[0]
    np.testing.assert_allclose(out[:SPLIT], np.asarray(GOLDEN["packed"])[:SPLIT], atol=1e-6)
    leaking = attend(ROPE, Q, shifted(K, starts=()), V, **options)[0]
    close(leaking, GOLDEN["packed"], 1e-6)
    safe = attend(ROPE, Q, shifted(K, starts=(SPLIT,)), V, **options)[0]
    close(out, safe, 1e-6)
    assert np.abs(out - leaking)[SPLIT:].max() > 1e-2


@pytest.mark.parametrize("start", [None, 3])
def test_matches_a_loop_with_padding_within_the_segment(start):
    q, k, v = qkv(batch=1, length=21)
    segment_ids = np.zeros((1, 21), np.int32)
    segment_ids[0, [0, 1, 9, 10, 11]] = -1
    segment_ids[0, 14:] = 3
    real = segment_ids[0] >= 0
    starts = (0, int(real[:14].sum()))
    moved = shifted(k[:, real], starts, start or H // 2)
    ids, places = segment_ids[0, real], np.arange(real.sum())
    expected = softmax_attention(
        q[:, real],
        moved,
        v[:, real],
        lambda q, k, n, i, j: q @ k / np.sqrt(H),
        positions=places,
        sees=lambda i, j: j <= i and ids[i] == ids[j],
    )
    placement = {"positions": np.arange(21, dtype=np.int32)[None], "segment_ids": segment_ids}
    scheme = pe.PartialKeyOffset(H, start=start)
    out = oracle.attend(scheme, {}, q, k, v, is_causal=True, scale=H**-0.5, **placement)
    close(out[:, real], expected, 1e-6)


ERRORS = [
    (pe.PartialKeyOffset, {"start": 0}, "start must be a dimension"),
    (pe.PartialKeyOffset, {"start": H}, "start must be a dimension"),
]
