"""Layers whose positions act on the logits, or on images; and tables at the input."""

import functools

import torch

from tests.makers.hf_record import (
    RECORDS,
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
from tests.makers.hf_rotary import rotated

LENGTH = 12
FAR = [0, 1, 257, 3838, 4094, 4095]  # Keys of the query at 4095: distances 4095 to 0.


def _t5(model_type, is_decoder):
    sizes = {"d_model": 48, "d_kv": 8, "num_heads": 6, "num_layers": 2, "d_ff": 8}
    buckets = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 10}
    config = make_config(model_type, is_decoder=is_decoder, **sizes, **buckets)
    cls = next(c for n, c in vars(modeling(config)).items() if n.endswith("T5Attention"))
    attend = randomize(cls(config, has_relative_attention_bias=True, layer_idx=0))
    x = tokens(1, LENGTH, 48)
    RECORDS.clear()
    with hooked(attend, q="q", k="k", v="v", out="<o") as store:
        mask = causal(LENGTH) if is_decoder else None
        options = {"attention_mask": mask} if model_type == "umt5" else {"mask": mask}
        attend(x, **options)
    options = {"past_seen_tokens": 4095}
    far = attend.compute_bias(1, 4096, **options)[0, :, 0, FAR]
    made = {n: heads(y, 6) for n, y in store.items()}
    table = attend.relative_attention_bias.weight
    return config, 0, is_decoder, arrays(table=table, far=far, far_keys=FAR, **made)


def bloom():
    config = make_config("bloom", hidden_size=48, n_head=6, n_layer=1)
    file = modeling(config)
    attend = randomize(file.BloomAttention(config, layer_idx=0))
    slopes = file.build_alibi_tensor(torch.ones(1, LENGTH), 6, torch.float64)
    x = tokens(1, LENGTH, 48)
    with hooked(attend, qkv="query_key_value", out="<dense") as store:
        attend(x, x, slopes, causal(LENGTH))
    q, k, v = store["qkv"].reshape(1, LENGTH, 6, 3, 8).unbind(3)
    far = file.build_alibi_tensor(torch.ones(1, 4096), 6, torch.float64)[:, 0]
    far = far[:, FAR] - far[:, -1:]  # Rows may differ by a constant.
    return config, 0, True, arrays(q=q, k=k, v=v, out=heads(store["out"], 6), far=far, far_keys=FAR)


def mpt():
    config = make_config(
        "mpt", d_model=48, n_heads=6, n_layers=1, attn_config={"softmax_scale": 0.2}
    )
    file = modeling(config)
    attend = randomize(file.MptAttention(config, layer_idx=0))
    hidden = torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool).triu(1)
    with hooked(attend, qkv="Wqkv", out="<out_proj") as store:
        bias = file.build_mpt_alibi_tensor(6, LENGTH)
        attend(tokens(1, LENGTH, 48), bias, attention_mask=hidden)
    q, k, v = (heads(y, 6) for y in store["qkv"].chunk(3, -1))
    far = file.build_mpt_alibi_tensor(6, 4096)[:, 0, FAR]
    return config, 0, True, arrays(q=q, k=k, v=v, out=heads(store["out"], 6), far=far, far_keys=FAR)


def falcon_alibi():
    """Six heads, whose slopes bfloat16 holds: Falcon rounds them."""
    settings = {"alibi": True, "multi_query": False}
    config = make_config("falcon", hidden_size=48, num_attention_heads=6, **settings)
    file = modeling(config)
    attend = randomize(file.FalconAttention(config, layer_idx=0))
    slopes = file.build_alibi_tensor(torch.ones(1, LENGTH), 6, torch.float64)
    with hooked(attend, qkv="query_key_value", out="<dense") as store:
        attend(tokens(1, LENGTH, 48), slopes, causal(LENGTH))
    q, k, v = store["qkv"].reshape(1, LENGTH, 6, 3, 8).unbind(3)
    return config, 0, True, arrays(q=q, k=k, v=v, out=heads(store["out"], 6))


def falcon():
    """Multi-query RoPE."""
    config = make_config(
        "falcon", hidden_size=64, num_attention_heads=4, max_position_embeddings=4096
    )
    file = modeling(config)
    attend = randomize(file.FalconAttention(config, layer_idx=0))
    at = torch.tensor([[0, 1, 257, 4095]])
    x = tokens(1, 4, 64)
    with (
        hooked(attend, qkv="query_key_value", out="<dense") as store,
        watch(file, "apply_rotary_pos_emb") as calls,
    ):
        where = file.FalconRotaryEmbedding(config)(x, at)
        attend(x, None, causal(4), position_embeddings=where)
    q_rot, k_rot = (y.transpose(1, 2) for y in calls[0][1])
    qkv = store["qkv"].reshape(1, 4, 6, 16)
    made = {
        "q": qkv[:, :, :4],
        "k": qkv[:, :, 4:5],
        "v": qkv[:, :, 5:],
        "out": heads(store["out"], 4),
    }
    return config, 0, True, arrays(positions=at, q_rot=q_rot, k_rot=k_rot, **made)


def gptj():
    settings = {"n_embd": 64, "n_head": 4, "n_layer": 1, "rotary_dim": 8, "n_positions": 4096}
    config = make_config("gptj", **settings)
    attend = randomize(modeling(config).GPTJAttention(config, layer_idx=0))
    at = torch.tensor([[0, 1, 257, 4095]])
    names = {"q": "q_proj", "k": "k_proj", "v": "v_proj"}
    with hooked(attend, out="<out_proj", **names) as store, watch(attend, "_attn") as calls:
        attend(tokens(1, 4, 64), attention_mask=causal(4), position_ids=at)
    (args, _) = calls[0]
    q_rot, k_rot, v = (y.transpose(1, 2) for y in args[:3])
    made = {"q_rot": q_rot, "k_rot": k_rot, "v": v, "out": heads(store["out"], 4)}
    made |= {n: heads(store[n], 4) for n in "qk"}
    return config, 0, True, arrays(positions=at, **made)


def _deberta(shared, terms):
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 1}
    reach = {"relative_attention": True, "max_relative_positions": 10, "position_buckets": 4}
    more = {"share_att_key": shared, "pos_att_type": terms, "max_position_embeddings": 16}
    config = make_config("deberta-v2", **sizes, **reach, **more)
    attend = randomize(modeling(config).DisentangledSelfAttention(config))
    table = tokens(8, 48, seed=5)
    x = tokens(1, LENGTH, 48)
    q, k, v = attend.query_proj(x), attend.key_proj(x), attend.value_proj(x)
    out, _ = attend(x, torch.ones(1, 1, LENGTH, LENGTH), rel_embeddings=table)
    if shared:
        learned = {"keys": attend.key_proj(table), "queries": attend.query_proj(table)}
        learned = {n: y.reshape(8, 6, 8) for n, y in learned.items()}
    else:
        learned = {"table": table, "keys": attend.pos_key_proj.weight.T.reshape(48, 6, 8)}
    made = {n: heads(y, 6) for n, y in {"q": q, "k": k, "v": v, "out": out}.items()}
    return config, 0, False, arrays(**made, **{f"param.{n}": y for n, y in learned.items()})


def xlnet():
    config = make_config("xlnet", d_model=48, n_head=6, n_layer=1, d_inner=8, attn_type="bi")
    file = modeling(config)
    model = file.XLNetModel(config)
    attend = randomize(file.XLNetRelativeAttention(config))
    x = tokens(LENGTH, 1, 48)  # [T, B, D]
    emb = model.relative_positional_encoding(LENGTH, LENGTH, bsz=1)
    with watch(attend, "rel_attn_core") as calls:
        attend(x, None, None, None, emb, None)
    args, out = calls[0]
    q, k, v = (y.transpose(0, 1) for y in args[:3])
    learned = {"u": attend.r_w_bias, "v": attend.r_r_bias, "project": attend.r.transpose(0, 1)}
    learned = {f"param.{n}": y for n, y in learned.items()}
    return config, 0, False, arrays(q=q, k=k, v=v, out=out.transpose(0, 1), **learned)


def wav2vec2_bert():
    sizes = {"hidden_size": 48, "num_attention_heads": 6, "num_hidden_layers": 1}
    ends = {"left_max_position_embeddings": 5, "right_max_position_embeddings": 2}
    config = make_config("wav2vec2-bert", **sizes, **ends)
    attend = randomize(modeling(config).Wav2Vec2BertSelfAttention(config))
    RECORDS.clear()
    names = {"q": "linear_q", "k": "linear_k", "v": "linear_v", "out": "<linear_out"}
    with hooked(attend, **names) as store:
        attend(tokens(1, LENGTH, 48))
    made = {n: heads(y, 6) for n, y in store.items()}
    return config, 0, False, arrays(table=attend.distance_embedding.weight, **made)


def inkling(layer=1):
    sizes = {"hidden_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    local = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
    more = {"d_rel": 3, "rel_extent": 7, "sliding_window_size": 4, "log_scaling_n_floor": 5}
    kinds = ["hybrid_sliding", "hybrid"]
    config = make_config(
        "inkling_text", num_hidden_layers=2, layer_types=kinds, **sizes, **local, **more
    )
    file = modeling(config)
    attend = randomize(file.InklingAttention(config, layer_idx=layer))
    x = tokens(1, LENGTH, 48)
    RECORDS.clear()
    with hooked(attend, q="q_norm", k="k_norm") as store:
        attend(x, causal(LENGTH))
    (record,) = RECORDS
    project = attend.r_proj.weight.T.reshape(48, 4, 3)
    learned = {"param.project": project, "param.bank": attend.rel_logits_proj.proj}
    made = {n: record[n] for n in ("v", "out")} | store
    return config, layer, True, arrays(x=x, **made, **learned)


def inkling2(layer=1):
    """All arrays of a layer, whose keys and values have inputs of their own."""
    sizes = {"hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    local = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8}
    more = {"d_rel": 3, "rel_extent": 7, "sliding_window_size": 4, "log_scaling_n_floor": 5}
    more |= {"qk_l2_clip_threshold": 1.2, "rel_l2_clip_threshold": 0.7, "rms_norm_eps": 0.03}
    kinds = ["hybrid_sliding", "hybrid"]
    config = make_config(
        "inkling2_text", num_hidden_layers=2, layer_types=kinds, **sizes, **local, **more
    )
    file = modeling(config)
    cls = file.Inkling2FullAttention if layer else file.Inkling2SlidingAttention
    attend = randomize(cls(config, layer_idx=layer))
    inputs = [tokens(1, LENGTH, 24, seed=seed) for seed in ((1, 2, 3) if layer else (1,))]
    RECORDS.clear()
    names = {"q": "q_l2_clip", "k": "k_l2_clip", "v": "v_norm", "sinks": "sink_proj"}
    with hooked(attend, r="rel_l2_clip", **names) as store:
        final, _ = attend(*inputs, causal(LENGTH), position_ids=torch.arange(LENGTH)[None])
    (record,) = RECORDS
    for name, threshold in (("q", 1.2), ("k", 1.2), ("r", 0.7)):
        lengths = store[name].norm(dim=-1)
        assert (
            lengths.max() <= threshold and 0.2 < (lengths < threshold - 1e-5).float().mean() < 0.8
        )
    del store["r"]
    project = attend.r_proj.weight.T.reshape(24, 4, 3)
    learned = {"param.project": project, "param.bank": attend.rel_logits_proj.proj}
    learned["param.scale"] = attend.rel_l2_clip.scale
    weights = {f"weights.{n}": x for n, x in attend.named_parameters()}
    inputs = dict(zip(("x", "x_k", "x_v"), inputs, strict=False))
    return (
        config,
        layer,
        True,
        arrays(out=record["out"], final=final, **inputs, **store, **learned, **weights),
    )


def _windowed(model_type, version):
    sizes = {"embed_dim": 24, "num_heads": [3, 6], "depths": [1, 1], "window_size": 4}
    more = {"image_size": 32, "patch_size": 2}
    if version == 2:
        more["pretrained_window_sizes"] = [3, 0]
    config = make_config(model_type, **sizes, **more)
    file = modeling(config)
    if version == 1:
        attend = randomize(file.SwinAttention(config, 24, 3, 4))
        names = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "out": "<o_proj"}
        learned = {"param.table": attend.relative_position_bias.relative_position_bias_table.T}
    else:
        attend = randomize(file.Swinv2SelfAttention(config, 24, 3, 4, [3, 3]))
        attend.logit_scale.data[1] = 9.0  # Above the limit.
        names = {"q": "query", "k": "key", "v": "value"}
        first, last = attend.continuous_position_bias_mlp[0], attend.continuous_position_bias_mlp[2]
        learned = {"in": first.weight, "in_bias": first.bias, "out": last.weight}
        learned = {
            f"param.{n}": y for n, y in (learned | {"tau": attend.logit_scale.ravel()}).items()
        }
    RECORDS.clear()
    with hooked(attend, **names) as store:
        result = attend(tokens(1, 16, 24))
    if version == 2:
        store["out"] = result[0]
    return config, 0, False, arrays(**{n: heads(y, 3) for n, y in store.items()}, **learned)


def dinov3():
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "image_size": 24, "patch_size": 8}
    config = make_config("dinov3_vit", num_register_tokens=1, **sizes)
    file = modeling(config)
    attend = randomize(file.DINOv3ViTAttention(config))
    emb = file.DINOv3ViTRopePositionEmbedding(config).eval()  # In training coordinates are noisy.
    cos, sin = emb(torch.zeros(1, 3, 16, 24))
    RECORDS.clear()
    with watch(file, "apply_rotary_pos_emb") as calls:
        attend(tokens(1, 8, 64), position_embeddings=(cos, sin))
    (record,) = RECORDS
    q, k = (y.transpose(1, 2) for y in calls[0][0][:2])
    return config, 0, False, arrays(q=q, k=k, grid_size=[2, 3, 2], **record)


def opt():
    config = make_config("opt", hidden_size=8, word_embed_proj_dim=8, max_position_embeddings=16)
    table = randomize(modeling(config).OPTLearnedPositionalEmbedding(16, 8))
    at = torch.tensor([[0, 1, 15]])
    return config, 0, False, arrays(positions=at, table=table.weight, embedded=table(None, 0, at))


def roberta():
    config = make_config(
        "roberta", hidden_size=8, num_attention_heads=2, max_position_embeddings=18
    )
    emb = randomize(modeling(config).RobertaEmbeddings(config))
    ids = torch.tensor([[5, 6, 7, 8]])
    at = emb.create_position_ids_from_input_ids(ids, 1)
    rows = emb.position_embeddings(at)
    table = emb.position_embeddings.weight
    return config, 0, False, arrays(positions=[[0, 1, 2, 3]], table=table, embedded=rows)


def whisper():
    config = make_config("whisper", d_model=8, max_source_positions=4096)
    table = modeling(config).sinusoids(4096, 8)
    at = [[0, 1, 257, 4095]]
    return config, 0, False, arrays(positions=at, embedded=table[at[0]][None])


GRID = torch.tensor([[0, 0, 0, 1, 1, 1, 2, 2, 2], [0, 1, 2] * 3])  # Rows and columns.
PIXTRAL = {
    **{"attention": "PixtralAttention$", "rotary": "Pixtral.*Rotary", "mask": None},
    **{"positions": GRID.T.tolist(), "tokens_count": 9, "grid": GRID[:, None]},
    "settings": {"image_size": 32, "patch_size": 4},
}
SINGLE = bloom, mpt, falcon_alibi, falcon, xlnet, wav2vec2_bert, inkling, inkling2
SINGLE += gptj, dinov3, opt, roberta, whisper
CASES = {function.__name__: function for function in SINGLE} | {
    "t5_encoder": functools.partial(_t5, "t5", False),
    "t5_decoder": functools.partial(_t5, "t5", True),
    "mt5_encoder": functools.partial(_t5, "mt5", False),
    "umt5_decoder": functools.partial(_t5, "umt5", True),
    "deberta_v2": functools.partial(_deberta, True, "p2c|c2p"),
    # With a projection of its own; its bias adds the same to all keys of a query.
    "deberta_v2_c2p": functools.partial(_deberta, False, ["c2p"]),
    # The mask of the window is not applied, only what was learned within it.
    "inkling_local": functools.partial(inkling, layer=0),
    "inkling2_local": functools.partial(inkling2, layer=0),
    "swin": functools.partial(_windowed, "swin", 1),
    "swinv2": functools.partial(_windowed, "swinv2", 2),
    "pixtral": functools.partial(rotated, "pixtral", **PIXTRAL),
}
