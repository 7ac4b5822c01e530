"""Makes towers.npz: python -m tests.makers hf_towers, with the group `parity`.

A small tower of each model type runs in float64 on a grid of patches, with random weights. Of one
layer the file has the projected queries, keys and values, the parameters of norms, the coordinates
of the patches, and the output of attention before its projection. A test compares all layers.
"""

import contextlib
import importlib
import inspect
import logging
import warnings

import numpy as np
import torch
import transformers

import posenc_jax as pe
from tests.hf.test_layers import TOWERS_FILE, compared
from tests.makers.hf_models import attended, in_double, randomize, recorded, write
from tests.makers.hf_table import TOWERS

ROWS, COLUMNS = 2, 4
SIZES = {
    **dict.fromkeys(("hidden_size", "embed_dim"), 56),
    **dict.fromkeys(("num_heads", "num_attention_heads", "num_key_value_heads"), 2),
    **dict.fromkeys(("depth", "num_hidden_layers"), 2),
    **{"out_hidden_size": 56, "intermediate_size": 16, "patch_size": 14, "window_size": 28},
    **{"fullatt_block_indexes": [1], "deepstack_visual_indexes": [], "mlp_ratio": 1.0},
    **{"num_position_embeddings": 16, "pos_emb_height": 2, "pos_emb_width": 2, "image_size": 56},
    **{"text_hidden_size": 56, "position_embedding_size": 16, "head_dim": 28},
    **{"memory_attention_hidden_size": 56, "memory_attention_num_attention_heads": 2},
    **{"memory_attention_feed_forward_hidden_size": 8, "memory_attention_mlp_hidden_size": 8},
    **{"memory_attention_rope_feat_sizes": [COLUMNS, ROWS], "memory_attention_num_layers": 2},
    **{"projection_hidden_size": 16, "text_hidden_dim": 16, "layer_types": None},
}
MORE = {
    "lfm3_vl_vision": {"num_hidden_layers": 3, "num_key_value_heads": 1},
    "exaone4_5_vision": {"num_key_value_heads": 1},
    "qwen2_vl_vision": {"mlp_ratio": 1},
    "sam3_vit_model": {"window_size": 2, "global_attn_indexes": [1], "pretrain_image_size": 56},
    "gemma4_vision": {"num_key_value_heads": 1, "pooling_kernel_size": 2},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense"] * 2, "adapter_in_dim": 56},
    "muse_spark_vision": {"layer_types": ["window_attention", "full_attention"]},
}
MORE["muse_glimmer_vision"] = MORE["muse_spark_vision"]


def small(kind):
    """The small config of a tower, without its model type."""
    fields = transformers.CONFIG_MAPPING[kind].__dataclass_fields__.keys()
    raw = {n: x for n, x in SIZES.items() if n in fields and x is not None}
    return raw | MORE.get(kind, {})


def build(kind, raw):
    """A tower and the file of its class."""
    cls = transformers.CONFIG_MAPPING[kind]
    config = cls.from_dict({"model_type": kind} | raw)
    config._attn_implementation = "eager"
    file = importlib.import_module(cls.__module__.replace("configuration_", "modeling_"))
    if kind in ("edgetam_video", "sam2_video", "sam3_tracker_video"):
        config.memory_attention_rope_feat_sizes = [COLUMNS, ROWS]
        name = next(n for n in vars(file) if n.endswith("VideoMemoryAttention"))
        return randomize(getattr(file, name)(config)), file, config
    models = [
        x
        for n, x in vars(file).items()
        if isinstance(x, type)
        and issubclass(x, transformers.PreTrainedModel)
        and getattr(x, "config_class", None) is cls
        and "PreTrained" not in n.removesuffix("PretrainedModel")
    ]
    return randomize(models[-1](config)), file, config


def images(model, config):
    """Inputs of several shapes: the tower takes one."""
    count, patch = ROWS * COLUMNS, getattr(config, "patch_size", 14)
    channels = getattr(config, "num_channels", getattr(config, "in_channels", 3))
    frames = getattr(config, "temporal_patch_size", getattr(config, "patch_temporal", 1))
    grid = torch.tensor([[1, ROWS, COLUMNS]])
    places = torch.cartesian_prod(torch.arange(ROWS), torch.arange(COLUMNS)).flip(-1)[None]
    shapes = [
        (count, channels * frames * patch * patch),
        (count, channels, patch, patch),
        (count, channels * patch * patch),
        (1, count, channels, patch, patch),
        (1, count, channels * patch * patch),
        (1, channels, ROWS * patch, COLUMNS * patch),
        (1, channels, 4 * patch, 4 * patch),
        (count, frames, 2 * patch, 2 * patch, channels),
    ]
    more = {"grid_thw": grid, "image_grid_thw": grid, "pixel_position_ids": places}
    more |= {"merge_sizes": torch.tensor([getattr(config, "spatial_merge_size", 1)])}
    names = inspect.signature(model.forward).parameters
    more = {n: x for n, x in more.items() if n in names}
    return [((torch.randn(shape),), more) for shape in shapes]


def run(kind, raw):
    """The config and the layers of a tower: dicts of arrays."""
    with in_double(), torch.no_grad():
        torch.manual_seed(0)
        model, file, config = build(kind, raw)
        places = []
        for module in model.modules():
            if type(module).__name__.endswith("RotaryEmbedding"):
                module.register_forward_hook(
                    lambda _, args, options, y: places.append([*args, *options.values()][1]),
                    with_kwargs=True,
                )
        if hasattr(model, "rotary_emb") and hasattr(model.layers[0], "cross_attn_image"):
            x = torch.randn(1, 1, ROWS * COLUMNS, config.memory_attention_hidden_size)
            with recorded(model, file) as events:
                rope = model.rotary_emb(x, model.position_ids)
                for layer in model.layers:
                    layer.self_attn(query=x, key=x, value=x, position_embeddings=rope)
            return layers(events, places)
        errors = []
        for args, options in images(model, config):
            places.clear()
            with recorded(model, file) as events, contextlib.suppress(StopIteration):
                try:
                    model(*args, **options)
                    return layers(events, by_region(model, file, places))
                except Exception as error:
                    errors.append(f"{[tuple(x.shape) for x in args]} {error}"[:200])
        raise ValueError("\n".join(errors))


def by_region(model, file, places):
    """The coordinates with patches of a region next to each other, if the tower moves angles so."""
    if not hasattr(model, "permute_input_for_window_attn"):
        return places
    sizes = model.spatial_merge_size, model.window_size, model.patch_size
    index, _ = file.get_vision_window_index(torch.tensor([[1, ROWS, COLUMNS]]), *sizes)
    move = model.permute_input_for_window_attn
    return [move(x.double(), index, seq_len=len(x)) for x in places]


def layers(events, places):
    """The layers that attended, in order."""
    calls, parts = {}, {}
    for name, module, args, options, result in events:
        if name == "eager_attention_forward":
            calls.setdefault(id(args[0]), (args[0], []))[1].append((args, options, result[0]))
        elif name == "call":
            parts.setdefault(id(module), result)
    out = []
    for module, its_calls in calls.values():
        children = dict(module.named_children())
        arguments = [attended(args, options) for args, options, _ in its_calls]
        length, index = 0, 0
        while index < len(arguments) and length < arguments[0]["query"].shape[0] * ROWS * COLUMNS:
            length += arguments[index]["query"].shape[2]
            index += 1
        arguments, results = arguments[:index], [r for _, _, r in its_calls[:index]]
        query, key, value = (
            torch.cat([g[n] for g in arguments], 2) for n in ("query", "key", "value")
        )
        heads, kv_heads, dim = query.shape[1], key.shape[1], query.shape[3]
        if "qkv" in children:
            x = parts[id(children["qkv"])]
            q, k, _ = x.split([heads * dim, kv_heads * dim, kv_heads * dim], -1)
        else:
            q, k = (
                parts[id(next(children[c] for c in (n, f"{n}_proj") if c in children))]
                for n in "qk"
            )
        batch, tokens = query.shape[0], query.shape[2]
        lengths = [g["query"].shape[2] for g in arguments]
        about = {"lengths": lengths, "scale": arguments[0]["scaling"]}
        arrays = {
            "q": q.reshape(batch, tokens, heads, dim),
            "k": k.reshape(batch, tokens, kv_heads, dim),
            "v": value.transpose(1, 2),
            "q_rot": query.transpose(1, 2),
            "k_rot": key.transpose(1, 2),
            "out": torch.cat(results, 1).reshape(batch, tokens, heads, dim),
            "coordinates": by_axis(places[min(len(out), len(places) - 1)], tokens),
        }
        norms = {n: children[f"{n}_norm"] for n in "qk" if f"{n}_norm" in children}
        arrays |= {f"{n}_norm.scale": norm.weight for n, norm in norms.items()}
        arrays = {n: np.asarray(x.detach(), np.float64) for n, x in arrays.items()}
        out.append((about, {n: x[:1] if x.ndim == 4 else x for n, x in arrays.items()}))
    return out


def by_axis(places, tokens):
    """Coordinates [axes, 1, T], the row before the column: the first that changes alone."""
    places = places.reshape(-1, places.shape[-1])[:tokens].T
    changes = (places[:, 1:] != places[:, :-1]).T.tolist()
    if len(places) == 2 and next(x for x in changes if sum(x) == 1)[0]:
        places = places.flip(0)
    return places[:, None].double()


def error(kind, raw):
    """The greatest error of rotated queries and keys and of outputs, over all layers."""
    layers = pe.from_hf({"model_type": kind} | raw)
    specs = [spec for spec in layers if spec.mixer == "attention"]
    results = run(kind, raw)
    return max(compared(spec, *result) for spec, result in zip(specs, results, strict=True))


def main(argv):
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    about, arrays = {}, {}
    for kind in TOWERS:
        raw = small(kind)
        (facts, layer), *_ = run(kind, raw)
        layer = {n: x for n, x in layer.items() if n[1:] != "_rot"}
        about[kind] = {"config": {"model_type": kind} | raw} | facts
        arrays |= {f"{kind}.{n}": x.astype(np.float32) for n, x in layer.items()}
    write(TOWERS_FILE, "attention layers of towers", about, arrays)
