"""Keys about positions change the layers of a config, or are refused.

For one model type of each row of the table, each key is set to two values in small configs: at the
top, in the rotary dict, in that of each kind of layers, and beside a `text_config`. One of the two
values may agree with what the model does without the key. If both change nothing, the key is read
without effect.
"""

import pytest

import posenc_jax as pe
from posenc_jax.hf import config_reader
from posenc_jax.hf.config_reader import KIND_OF, model_type_defaults
from posenc_jax.hf.layer_kinds import FULL, LOCAL
from tests.hf.test_raw_configs import ROWS, keys_read, read
from tests.makers.hf_table import NEEDED

DEFAULTS = model_type_defaults()
BY_KIND = [kind for kind, keys in DEFAULTS.items() if FULL in keys.get("rope_parameters", {})]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
VALUES = {
    "a positive integer": (1, 6),
    "an integer from 0": (3, 2),
    "an integer": (6, 10),
    "one or several positive integers": (6, 10),
    "a positive number": (0.3, 777.0),
    "a number": (0.3, 3.0),
    "true or false": (True, False),
    "true, false or an integer from 0": (True, False),
    "a string": ("x", "y"),
    "a dict": (YARN, {"rope_theta": 777.0}),
    "a list of strings": (["x"], ["y"]),
    "a list of numbers from 0": ([0.0, 5.0], [777.0, 3.0]),
    "a list of numbers": ([2.0] * 32, [3.0] * 32),
    "a list of integers from 0": ([1], [0, 1, 2]),
    "a list of 0 and 1": ([1, 0], [0, 1]),
}
KEYS = {key for key in KIND_OF if config_reader._POSITION.search(key)}
KEYS -= {key for key, values in config_reader._HARMLESS.items() if not values} | {"layer_types"}
KEYS -= {"original_max_position_embeddings"}  # Phi-3's configs have it with any map.
OF_ATTENTION = {"attn_logit_softcapping", "query_pre_attn_scalar", "attention_multiplier"}

# Keys that some model types read without effect.
WITHOUT_EFFECT = {
    # Of full or of compressing layers, in a config that has none.
    "compress_rope_theta": "deepseek_v4",
    "global_rope_theta": "modernbert modernbert-decoder",
    "rope_scaling": "gemma3_text gemma3n_text kimi_linear olmo3",
    "rope_theta": "deepseek_v4 esm gemma3_text gemma3n_text kimi_linear nemotron_h",
    # Releases have them, though nothing rotates.
    "partial_rotary_factor": "nemotron_h",
    "qk_nope_head_dim": "kimi_linear",
    "qk_rope_head_dim": "kimi_linear",
    # Of layers with a window, which are not the default.
    "sliding_window": "laguna lfm3 mellum",
    "use_sliding_window": "laguna lfm3 mellum minimax ministral3 phi4_multimodal starcoder2",
    # Beside layer_types, or without a window.
    "max_window_layers": """
        ministral3 phi4_multimodal qwen2 qwen2_moe qwen2_vl_text qwen3 starcoder2
    """,
    "max_target_positions": "whisper",  # Of the decoder.
    "query_pre_attn_scalar": "gemma3n_text",  # Releases have it.
    "right_max_position_embeddings": "wav2vec2-bert",  # Less than the left one.
    "rotary_embedding_base": "wav2vec2-bert",  # Its default is no RoPE.
    "sinusoidal_pos_embds": "distilbert",  # How its table starts.
    "max_2d_position_embeddings": "layoutlm",  # Of boxes of words.
    # Of the table of patches and of regions of an image, and of networks of different widths.
    "num_position_embeddings": "qwen4_exp_vision",
    "position_embedding_size": "gemma4_vision",
    "window_size": "qwen2_5_vl_vision sam3_vit_model",
    "per_layer_config": "dots3_note_vision_encoder",
    # Of the grid of a feature map, and of training.
    "memory_attention_rope_feat_sizes": "sam3_tracker_video",
    "memory_attention_rope_k_sizes": "sam3_tracker_video",
    "memory_attention_rope_dropout": "sam3_tracker_video",
}
SWITCHES = {
    "granitemoehybrid": {"position_embedding_type": "rope"},
    "zamba2": {"use_mem_rope": True},
}


def bases(kind):
    """Small configs: by the defaults, with layers of two kinds, and with a window alone."""
    count = len(NEEDED.get(kind, {}).get("layer_types", range(12 if kind in NEEDED else 6)))
    config = {"model_type": kind} | NEEDED.get(kind, {}) | SWITCHES.get(kind, {})
    if "depths" not in DEFAULTS[kind]:
        config["num_hidden_layers"] = count
    if "use_sliding_window" in DEFAULTS[kind]:
        config |= {"sliding_window": 64, "use_sliding_window": True}
    if kind in ("qwen2", "qwen2_moe", "qwen2_vl_text", "qwen3"):
        config["max_window_layers"] = 1
    yield config
    for kinds in ([LOCAL, FULL], [LOCAL, LOCAL]):
        config = config | {"layer_types": kinds, "num_hidden_layers": 2}
        for more in ({}, {"sliding_window": 64}):
            if not isinstance(read(config | more), str):
                yield config | more
                break


def looked_up(config):
    """The names of keys that the readers of a config look up; it refuses others about positions."""
    others = config_reader._OTHER_NAMES
    return {name for _, key in keys_read(config) for name in (key, *others.get(key, ()))}


def without_effect(keys, layers, change):
    """The keys of which neither of two values changes the layers of a config."""
    assert not isinstance(layers, str), layers
    values = {key: VALUES[KIND_OF[key]] for key in keys}
    return [key for key in keys if all(read(change({key: x})) == layers for x in values[key])]


def values_of(tree, key):
    """The values of a key in nested dicts."""
    for name, value in tree.items() if isinstance(tree, dict) else ():
        yield from [value] if name == key else values_of(value, key)


def is_used(layers, key, value):
    """Whether a base or a part is that of a layer."""
    schemes = [layer.scheme for layer in layers if isinstance(layer.scheme, pe.RoPE)]
    if key == "rope_theta":
        return value in {scheme.theta for scheme in schemes}
    parts = {getattr(scheme.scaling, "fraction", None) for scheme in schemes}
    return value in parts or any(int(value * s.head_dim) == s.num_rotated for s in schemes)


@pytest.mark.parametrize("kind", ROWS.values())
def test_keys_at_the_top(kind):
    for config in bases(kind):
        keys = OF_ATTENTION | KEYS & looked_up(config)
        for key in without_effect(keys, read(config), config.__or__):
            assert kind in WITHOUT_EFFECT.get(key, "").split(), (config, key)


@pytest.mark.parametrize("kind", BY_KIND)
def test_a_default_of_other_layers_does_not_agree(kind):
    for config in bases(kind):
        for key in ("rope_theta", "partial_rotary_factor"):
            for value in {*values_of(DEFAULTS, key)}:
                layers = read(config | {key: value})
                assert isinstance(layers, str) or is_used(layers, key, value), (config, key, value)


@pytest.mark.parametrize("kind", ROWS.values())
def test_layer_types_are_those_of_the_layers(kind):
    for config in bases(kind):
        count = len(config.get("layer_types", range(config.get("num_hidden_layers", 2))))
        for name in (FULL, LOCAL):
            layers = read(config | {"layer_types": [name] * count})
            if isinstance(layers, str) or kind in ("deepseek_v4", "minimax"):  # All have a window.
                continue
            layers = layers[:-1] if kind.startswith("gemma4") else layers  # The last one is global.
            assert {layer.mixer for layer in layers} == {"attention"}
            assert {layer.window is None for layer in layers} == {name == FULL}, (config, name)


ROPES = {
    "default": {"rope_theta": 777.0},
    "yarn": YARN | {"rope_theta": 777.0},
    "alpha": {"rope_type": "dynamic", "factor": 1.0, "alpha": 1000.0},  # Hunyuan's.
}
ROPE_KEYS = """
alpha attention_factor beta_fast beta_slow factor high_freq_factor llama_4_scaling_beta long_factor
long_mscale low_freq_factor mrope_interleaved mrope_section mscale mscale_all_dim
original_max_position_embeddings partial_rotary_factor rope_theta short_factor short_mscale
sliding_window truncate
""".split()
# Beside alpha, in releases of Hunyuan.
UNUSED = {"factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}


@pytest.mark.parametrize("kind", ROWS.values())
def test_keys_in_rotary_dicts(kind):
    """The dict of a config, or that of each kind of layers."""
    for name, rope in ROPES.items():
        keys = {*ROPE_KEYS} - (UNUSED if name == "alpha" else set())
        for config in [*bases(kind)][:2]:
            rope = config.get("rope_parameters", {}) | rope
            parts = {FULL: rope, LOCAL: rope | {"rope_theta": 888.0}}
            changes = [lambda new, c=config, r=rope: c | {"rope_parameters": r | new}]
            if config.get("layer_types") == [LOCAL, FULL]:
                changes = [
                    lambda new, c=config, p=parts, n=n: c | {"rope_parameters": p | {n: p[n] | new}}
                    for n in parts
                ]
            for change in changes:
                layers = read(change({}))
                if not isinstance(layers, str):
                    assert not without_effect(keys, layers, change), change({})


OUTER = """
attn_logit_softcapping head_dim layer_types partial_rotary_factor query_pre_attn_scalar
rope_parameters rope_scaling rope_theta sliding_window use_sliding_window
""".split()


@pytest.mark.parametrize("kind", ROWS.values())
def test_keys_beside_a_text_config(kind):
    """The same key in both places contradicts itself unless it means the same."""
    config = next(bases(kind))
    for key in looked_up(config).intersection(OUTER):
        inner = config | {key: None}
        layers = read(inner)
        if isinstance(layers, str):
            continue
        value = ["x"] if key == "layer_types" else VALUES[KIND_OF[key]][0]
        expected = f"from_hf: the vlm config has {key}={value!r} and its text_config {key}=None."
        if read(inner | {key: value}) == layers:
            expected = layers
        outer = {"model_type": "vlm", "text_config": inner, key: value}
        assert read(outer) == expected
