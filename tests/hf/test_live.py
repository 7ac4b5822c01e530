"""The same comparison with the installed transformers; needs the group `parity`."""

import collections

import pytest

import posenc_jax as pe
from posenc_jax.hf.model_types import MODEL_TYPES

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.needs("torch", "transformers>=5.24"),
]


def test_layers_of_small_models_with_drawn_configs():
    from tests.makers import hf_layers

    outcomes = collections.Counter()
    for kind in MODEL_TYPES.keys() - hf_layers.NOT_RUN:
        for raw, _, outcome, text in hf_layers.draws(kind, seed=0, count=2):
            assert outcome not in ("differs", "error"), (kind, raw, text)
            outcomes[outcome] += 1
    assert outcomes["same"] > 250


def test_windows_of_config_objects():
    """A model of an object against what `from_hf` reads from the object."""
    import torch
    import transformers

    config = transformers.Gemma3TextConfig(
        **{"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2},
        **{"num_key_value_heads": 1, "head_dim": 16, "num_hidden_layers": 1, "sliding_window": 12},
        **{"layer_types": ["sliding_attention"], "use_bidirectional_attention": True},
        attn_implementation="eager",
    )
    model = transformers.Gemma3TextModel(config).eval()
    with torch.no_grad():
        weights = model(torch.arange(40)[None], output_attentions=True).attentions[0][0, 0]
    reach = max(abs(i - j) for i, j in weights.nonzero().tolist())
    assert pe.from_hf(config)[0].window == reach + 1 == 7
