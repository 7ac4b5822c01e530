"""Layers that rotate queries and keys."""

import functools

import torch

from tests.makers.hf_record import (
    POSITIONS,
    RECORDS,
    SMALL,
    arrays,
    causal,
    find,
    heads,
    hooked,
    make_config,
    modeling,
    randomize,
    tokens,
    watch,
)


def rotated(
    model_type,
    *,
    layer=0,
    settings=None,
    positions=None,
    rotary=r"^(?!.*(Vision|Audio)).*RotaryEmbedding$",
    attention=r"^(?!.*(Vision|Audio|Cross|Flash|Linear)).*Attention$",
    function="apply_rotary_pos_emb",
    projections=None,
    mask="causal",
    weights=None,
    grid=None,
    tokens_count=None,
    leading=False,
    **call,
):
    """A layer whose file has a rotary module, a function that rotates, and an attention module.

    q and k are the arguments of the function, or with `projections` the outputs of these linear
    maps. Where they are a part of a head they are its end, or with `leading` its beginning.
    """
    config = make_config(model_type, **SMALL | (settings or {}))
    file = modeling(config)
    attend = randomize(_made(find(file, attention), config, layer))
    at = torch.tensor([POSITIONS]) if positions is None else torch.tensor(positions)
    length = tokens_count or at.shape[-1]
    x = tokens(1, length, config.hidden_size)
    kinds = getattr(config, "layer_types", None)
    emb = find(file, rotary)(config)
    if weights:
        weights(emb, attend)
    where = _embedding(emb, x, at, kinds, layer)
    RECORDS.clear()
    hidden = causal(length) if mask == "causal" else None
    with watch(file, function) as calls, hooked(attend, **projections or {}) as store:
        attend(
            hidden_states=x,
            position_embeddings=where,
            attention_mask=hidden,
            position_ids=at,
            **call,
        )
    (record,) = RECORDS
    raw = {"q": record["q_rot"], "k": record["k_rot"]}
    if calls:
        raw = dict(untouched(calls, record, leading))
    raw |= {n: heads(y, record[f"{n}_rot"].shape[2]) for n, y in store.items()}
    if hasattr(attend, "sinks"):
        raw["sinks"] = attend.sinks
    return (
        config,
        layer,
        mask == "causal",
        arrays(positions=at if grid is None else grid, **raw, **record),
    )


def _made(cls, config, layer):
    try:
        return cls(config, layer_idx=layer)
    except TypeError:
        return cls(config)


def _embedding(module, x, at, kinds, layer):
    if kinds is None:
        return module(x, at)
    try:
        return module(x, at, kinds[layer])
    except TypeError:
        return module(x, at)


def untouched(calls, record, leading=False):
    """The arguments of the rotation, joined with the dimensions that are not rotated."""
    given = [a for args, _ in calls for a in args[: 3 - len(calls)]]  # (q, k), or q and then k.
    for name, x in zip("qk", given, strict=True):
        final = record[f"{name}_rot"]
        if x.shape[-3:] == final.transpose(-3, -2).shape[-3:] or x.shape[-2] == final.shape[1]:
            x = x.transpose(-3, -2)
        x = x.reshape(1, *x.shape[-3:]).expand(*final.shape[:3], -1)
        rest = final.shape[-1] - x.shape[-1]
        whole = [x, final[..., x.shape[-1] :]] if leading else [final[..., :rest], x]
        yield name, torch.cat(whole, -1)


YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0}
YARN |= {"original_max_position_embeddings": 512, "beta_fast": 8.0, "beta_slow": 1.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 256}
HEATED = {"llama_4_scaling_beta": 0.3, "mscale": 1.0, "mscale_all_dim": 1.0}
WIDE = {"head_dim": 16}
SIX = {"num_hidden_layers": 6}
LLAMA4 = {
    "settings": WIDE | {"use_qk_norm": False, "floor_scale": 3, "attn_scale": 0.7},
    "function": "apply_rotary_emb",
}
# Up to the trained length, where nothing changes, and at 5999, where the base does.
DYNAMIC = {"positions": [[0, 1, 2, 257, 4095, 5999]]}
GEMMA3 = WIDE | SIX | {"query_pre_attn_scalar": 20}
GEMMA3["rope_parameters"] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GEMMA4 = WIDE | SIX | {"global_head_dim": 32, "num_kv_shared_layers": 0}
GEMMA4 |= {"hidden_size_per_layer_input": 0, "num_global_key_value_heads": 2}
GEMMA4 = {"settings": GEMMA4, "shared_kv_states": {}}
PHI3 = {"pad_token_id": 0, "max_position_embeddings": 8192}
PHI3["rope_parameters"] = {
    **{"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
    "short_factor": [1.0, 1.0, 1.1, 1.2, 1.5, 2.0],
    "long_factor": [1.0, 1.5, 2.0, 4.0, 16.0, 32.0],
}
MLA = {
    **{"num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 16, "qk_nope_head_dim": 8},
    **{"qk_rope_head_dim": 16, "v_head_dim": 8},
    "rope_parameters": YARN | {"mscale": 0.8, "mscale_all_dim": 1.0},
}
LATENT = {"function": "apply_rotary_pos_emb_interleave"}
GPT_OSS = WIDE | {"rope_parameters": YARN | {"truncate": False, "factor": 32.0}}


def scaled(**parameters):
    return {"settings": {"rope_parameters": parameters}}


def partial(share):
    return scaled(rope_type="default", rope_theta=1e4, partial_rotary_factor=share)


def trained(length):
    return {"settings": PHI3 | {"original_max_position_embeddings": length}}


# {name: (model type, options of `rotated`)}.
ROTATED = {
    "llama": ("llama", {"settings": WIDE}),
    "llama_3_1": ("llama", scaled(**LLAMA3)),
    "llama_linear": ("llama", scaled(rope_type="linear", rope_theta=10000.0, factor=4.0)),
    "llama_yarn": ("llama", scaled(**YARN)),
    "llama_dynamic": (
        "llama",
        DYNAMIC | scaled(rope_type="dynamic", rope_theta=10000.0, factor=4.0),
    ),
    "llama4": ("llama4_text", LLAMA4),
    "llama4_nope": (
        "llama4_text",
        {"layer": 3, "projections": {"q": "q_proj", "k": "k_proj"}, **LLAMA4}
        | {"positions": [list(range(12))]},
    ),
    "smollm3_nope": ("smollm3", {"layer": 3}),
    "cohere2": ("cohere2", {}),
    "cohere2_nope": ("cohere2", {"layer": 3}),
    "gemma3_sliding": ("gemma3_text", {"settings": GEMMA3}),
    "gemma3_full": ("gemma3_text", {"layer": 5, "settings": GEMMA3}),
    "gemma4_sliding": ("gemma4_text", GEMMA4),
    "gemma4_full": ("gemma4_text", {"layer": 5} | GEMMA4),
    "modernbert_full": ("modernbert", {"mask": None, "settings": SIX}),
    "modernbert_sliding": ("modernbert", {"layer": 1, "mask": None, "settings": SIX}),
    "exaone4_nope": ("exaone4", {"layer": 3}),
    "gpt_neox": ("gpt_neox", partial(0.5)),
    "stablelm": ("stablelm", {"leading": True} | partial(0.25)),
    "glm": ("glm", {"settings": WIDE}),
    "helium": ("helium", {"settings": WIDE}),
    "granite": ("granite", {"settings": {"attention_multiplier": 0.31}}),
    "phi3_short": ("phi3", trained(4096)),
    "phi3_long": ("phi3", trained(1024)),
    "deepseek_v3": ("deepseek_v3", {"settings": MLA} | LATENT),
    "deepseek_v3_half": ("deepseek_v3", {"settings": MLA | {"rope_interleave": False}}),
    "mistral4": (
        "mistral4",
        {"settings": MLA | {"rope_parameters": YARN | HEATED}, "projections": {"q": "q_proj"}}
        | LATENT,
    ),
    "ministral3": ("ministral3", {"settings": WIDE | {"rope_parameters": YARN | HEATED}}),
    "gpt_oss": ("gpt_oss", {"settings": GPT_OSS}),
}
CASES = {name: functools.partial(rotated, kind, **more) for name, (kind, more) in ROTATED.items()}
