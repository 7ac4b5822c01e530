"""Configs of DeepSeek-V4 as released, whose keys differ from the keys that transformers writes."""

import math

import numpy as np

import posenc_jax as pe

RELEASED = {
    "model_type": "deepseek_v4",
    "num_hidden_layers": 5,
    "compress_ratios": [0, 4, 128, 4, 0, 0],  # One more for the layer that predicts the next token.
    "head_dim": 512,
    "qk_rope_head_dim": 64,
    "sliding_window": 128,
    "rope_theta": 10000,
    "compress_rope_theta": 160000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 16,
        "original_max_position_embeddings": 65536,
        "beta_fast": 32,
        "beta_slow": 1,
    },
}


def released(dim, length, base, factor, fast, slow):
    """`precompute_freqs_cis` of DeepSeek-V4's inference/model.py, without the positions."""

    def corrected(rotations):
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(base))

    freqs = 1.0 / base ** (np.arange(0, dim, 2) / dim)
    if length:
        low = max(math.floor(corrected(fast)), 0)
        high = min(math.ceil(corrected(slow)), dim - 1)
        smooth = 1 - np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0, 1)
        freqs = freqs / factor * (1 - smooth) + freqs * smooth
    return freqs


def test_reads_the_released_config():
    layers = pe.from_hf(RELEASED)
    assert [layer.window for layer in layers] == [128] * 5
    assert all(
        layer.sinks and layer.softcap is layer.scale is layer.qk_norm is None for layer in layers
    )
    main, compress = layers[0].scheme, layers[1].scheme
    assert [layer.scheme for layer in layers] == [main, compress, compress, compress, main]
    for scheme, arguments in [
        (main, (64, 0, 10000, 16, 32, 1)),
        (compress, (64, 65536, 160000, 16, 32, 1)),
    ]:
        assert isinstance(scheme, pe.VORoPE) and scheme.layout == "interleaved"
        assert (scheme.rotary_start, scheme.num_rotated, scheme.attention_factor) == (448, 64, 1.0)
        np.testing.assert_allclose(scheme.base_frequencies, released(*arguments), rtol=1e-6)
    assert {layer.scale for layer in pe.from_hf(RELEASED)} == {None}
