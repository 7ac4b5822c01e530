"""Layers that rotate by several coordinates, or do more than rotate queries and keys."""

import functools

import torch

from tests.makers.hf_record import (
    POSITIONS,
    RECORDS,
    SMALL,
    arrays,
    causal,
    heads,
    hooked,
    make_config,
    modeling,
    randomize,
    tokens,
    watch,
)
from tests.makers.hf_rotary import MLA, YARN, rotated, untouched


def beam_nope():
    """Its positions go up to 4095: the scale counts in 2048."""
    config = make_config("beam", **SMALL | {"head_dim": 16, "num_hidden_layers": 6})
    at = torch.tensor([POSITIONS])
    scale = modeling(config).compute_attention_scaling(at)
    attend = randomize(modeling(config).BeamAttention(config, 5))
    RECORDS.clear()
    with hooked(attend, q="q_norm", k="k_norm") as store:
        attend(tokens(1, 6, 64), None, causal(6), attention_scaling=scale)
    return config, 5, True, arrays(positions=at, **store, **RECORDS[0])


class Everything(torch.nn.Module):
    """An indexer that chooses all keys."""

    def forward(self, x, *args, **options):
        return torch.arange(x.shape[1]).expand(1, x.shape[1], -1)


def mistral_large4(layer=0):
    """Learned frequencies and a learned softmax scale, with dense attention: all keys chosen."""
    config = make_config("mistral_large4_text", **SMALL | LARGE4)
    file = modeling(config)
    at = torch.tensor([[0, 1, 2, 5, 17, 63]])  # Learned frequencies are float32 numbers.
    attend = randomize(file.MistralLarge4TextAttention(config, layer))
    attend.indexer = Everything()
    emb = file.MistralLarge4TextRotaryEmbedding(config)
    emb.alpha.data = torch.tensor([0.5, -0.5, 0.25, 0.125, -0.25, 0.5, -0.125, 1.0])
    x = tokens(1, 6, 64)
    RECORDS.clear()
    with (
        watch(file, "apply_rotary_pos_emb_interleave") as calls,
        hooked(attend, q="q_proj") as store,
    ):
        attend(x, emb(x, at), causal(6), shared_kv_states={}, position_ids=at)
    (record,) = RECORDS
    k = dict(untouched(calls, record))["k"] if calls else record["k_rot"]
    scaling = attend.softmax_scaling
    learned = {"alpha": emb.alpha, "scale": scaling.scale, "bias": scaling.bias}
    return (
        config,
        layer,
        True,
        arrays(positions=at, q=heads(store["q"], 4), k=k, **learned, **record),
    )


LARGE4 = {n: MLA[n] for n in MLA if n != "rope_parameters"} | {
    "index_n_heads": 2,
    "index_head_dim": 16,
    "rope_parameters": YARN | {"attention_factor": 1.0},
}


def deepseek_v4(layer=0):
    """A layer with a window. The tokens are too few for an entry of a compressing layer."""
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "head_dim": 16, "q_lora_rank": 12}
    yarn = {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 512}
    config = make_config(
        "deepseek_v4",
        **sizes | {"o_groups": 2, "o_lora_rank": 5, "num_hidden_layers": 2},
        layer_types=["sliding_attention", "heavily_compressed_attention"],
        partial_rotary_factor=0.5,
        rope_scaling=yarn,
        sliding_window=8192,
    )
    file, at = modeling(config), torch.tensor([POSITIONS])
    attend, x = randomize(file.DeepseekV4Attention(config, layer_idx=layer)), tokens(1, 6, 48)
    tables = file.DeepseekV4RotaryEmbedding(config)
    RECORDS.clear()
    with (
        watch(file, "apply_rotary_pos_emb") as calls,
        hooked(attend, q="q_b_norm", k="kv_norm") as store,
    ):
        attend(x, {n: tables(x, at, n) for n in ("main", "compress")}, at, causal(6))
    (record,) = RECORDS
    key = store["k"][:, :, None]
    made = {"q": store["q"].transpose(1, 2), "k": key, "v": key, "sinks": attend.sinks}
    made |= {n: record[n] for n in ("q_rot", "k_rot")} | {"out": calls[-1][1].transpose(1, 2)}
    return config, layer, True, arrays(positions=at, **made)


GRID = [[[0, 1, 1, 1, 1, 257, 4095]], [[0, 1, 1, 2, 2, 257, 4095]], [[0, 1, 2, 1, 2, 257, 4095]]]


def multimodal(kind, wide=None, **more):
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0} | more}
    return functools.partial(rotated, kind, settings=rope | (wide or {}), positions=GRID)


INTERLEAVED = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
CASES = {
    "qwen2_vl": multimodal("qwen2_vl_text", mrope_section=[2, 3, 3]),
    "qwen3_vl": multimodal("qwen3_vl_text", {"head_dim": 16}, **INTERLEAVED),
    "ernie4_5_vl": multimodal("ernie4_5_vl_moe_text", mrope_section=[3, 3, 2]),
    "beam_nope": beam_nope,
    "mistral_large4": mistral_large4,
    "mistral_large4_nope": functools.partial(mistral_large4, layer=3),
    "deepseek_v4": deepseek_v4,
    # The base and the scaling of compressing layers.
    "deepseek_v4_compress": functools.partial(deepseek_v4, layer=1),
}
