"""Every model type that `from_hf` reads, and the reader of its config.

What these readers do not say, bases, sizes and windows that a config leaves out, is in
`defaults.json`.
"""

from typing import Any

from posenc_jax.hf import bias_and_table_families as other
from posenc_jax.hf import layer_kinds, rotary_families
from posenc_jax.hf.bias_and_table_families import Table
from posenc_jax.hf.deepseek_v4 import deepseek_v4
from posenc_jax.hf.layer_kinds import (
    FULL,
    LINEAR,
    LOCAL,
    LayerKinds,
    all_windowed,
    every,
    from_max_window_layers,
    two_sided_window_of,
    window_of,
)
from posenc_jax.hf.rotary_families import (
    Family,
    Latent,
    Multimodal,
    Rotating,
    only_windows_rotate,
)
from posenc_jax.schemes.logit_scale.temperature import QueryTemperature

_PLAIN = """
apertus arcee bitnet eurobert gemma granite granitemoe hyperclovax jais2 llama nomic_bert olmo
olmo2 olmoe flex_olmo seed_oss
"""
_PARTIAL = "persimmon phi stablelm glm4_moe nemotron solar_open"
_INTERLEAVED = "cohere ernie4_5 ernie4_5_moe helium"
_WINDOW_IN_ALL_LAYERS = "mistral mixtral starcoder2 phimoe qwen3_moe"
_WINDOW_IN_LAST_LAYERS = "qwen2 qwen3 dots1"


def _windowed(kinds: LayerKinds, **settings: Any) -> Family:
    return Rotating(kinds=kinds, window=window_of, **settings)


MODEL_TYPES: dict[str, Family] = {
    **dict.fromkeys(_PLAIN.split(), Rotating()),
    **dict.fromkeys(_PARTIAL.split(), Rotating(partial=True)),
    **dict.fromkeys(_INTERLEAVED.split(), Rotating("interleaved")),
    **dict.fromkeys(("glm", "glm4"), Rotating("interleaved", partial=True)),
    **dict.fromkeys(_WINDOW_IN_ALL_LAYERS.split(), _windowed(all_windowed)),
    **dict.fromkeys(_WINDOW_IN_LAST_LAYERS.split(), _windowed(from_max_window_layers)),
    "phi3": _windowed(all_windowed, partial=True),
    "qwen2_moe": _windowed(layer_kinds.qwen2_moe),
    "ministral": _windowed(layer_kinds.ministral),
    "ministral3": rotary_families.ministral3,
    "gemma2": _windowed(every(2)),
    "gpt_oss": _windowed(every(2)),
    "cwm": _windowed(every(4, first=True)),
    "olmo3": _windowed(every(4), scaled=(FULL,), null_rotates=True),
    "gemma3_text": Rotating(
        kinds=every(6, "sliding_window_pattern"),
        window=two_sided_window_of,
        bases=((FULL, "rope_theta"), (LOCAL, "rope_local_base_freq")),
        scaled=(FULL,),
        null_rotates=True,
    ),
    "gemma4_text": Rotating(kinds=layer_kinds.gemma4, window=two_sided_window_of),
    "modernbert": Rotating(
        kinds=every(3, "global_attn_every_n_layers", first=True),
        window=layer_kinds.modernbert_window,
        bases=((FULL, "global_rope_theta"), (LOCAL, "local_rope_theta")),
        scaled=(FULL, LOCAL),
        null_rotates=True,
    ),
    "beam": _windowed(every(6, last=True), instead=QueryTemperature(form="beam", length=2048)),
    "qwen3_next": Rotating(partial=True, kinds=every(4, "full_attention_interval", other=LINEAR)),
    "cohere2": only_windows_rotate("interleaved", every(4, "sliding_window_pattern")),
    "exaone4": rotary_families.exaone4,
    "exaone_moe": rotary_families.exaone4,
    "llama4_text": rotary_families.llama4,
    "smollm3": rotary_families.smollm3,
    "gptj": rotary_families.gptj,
    "codegen": rotary_families.gptj,
    "gpt_neox": rotary_families.gpt_neox,
    "minimax_m2": rotary_families.minimax_m2,
    "deepseek_v2": Latent(interleave=True, in_place=True),
    "deepseek_v3": Latent(),
    "deepseek_v32": Latent(),
    "deepseek_v4": deepseek_v4,
    "mistral4": Latent(),
    "mistral_large4_text": rotary_families.mistral_large4,
    "qwen2_vl_text": Multimodal(kinds=from_max_window_layers, sections=(16, 24, 24)),
    "qwen2_5_vl_text": Multimodal(kinds=from_max_window_layers, sections=(16, 24, 24)),
    "qwen3_vl_text": Multimodal("interleaved", sections=(24, 20, 20)),
    "qwen3_vl_moe_text": Multimodal("interleaved", sections=(24, 20, 20)),
    "ernie4_5_vl_moe_text": Multimodal(
        "alternating", "interleaved", sections=(22, 22, 20), time_last=True
    ),
    "roformer": other.roformer,
    "t5": other.t5,
    "mt5": other.t5,
    "umt5": other.t5,
    "bloom": other.bloom,
    "mpt": other.mpt,
    "falcon": other.falcon,
    "deberta-v2": other.deberta_v2,
    "xlnet": other.xlnet,
    "wav2vec2-bert": other.wav2vec2_bert,
    "inkling_text": other.inkling,
    "gpt2": Table(),
    "bert": Table(),
    "distilbert": Table(),
    "albert": Table(width="embedding_size"),
    "electra": Table(width="embedding_size"),
    "opt": Table(offset=2),
    "roberta": Table(reserved=True),
    "camembert": Table(reserved=True),
    "xlm-roberta": Table(reserved=True),
    "whisper": other.whisper,
    "pixtral": other.pixtral,
    "dinov3_vit": other.dinov3,
    "swin": other.swin,
    "swinv2": other.swin_v2,
}
