"""Every model type that `from_hf` knows, and how its config is read."""

from posenc_jax.hf import other_families as other
from posenc_jax.hf import rotary_families as rotary
from posenc_jax.hf.other_families import Buckets, Grid, Table
from posenc_jax.hf.rotary_families import Family, Latent, Multimodal, Plain
from posenc_jax.logit_scale.temperature import QueryTemperature

_HALF = """
apertus arcee bitnet cwm dots1 eurobert gemma gemma2 granite granitemoe hyperclovax
jais2 llama ministral mistral mixtral nomic_bert olmo olmo2 olmo3 olmoe flex_olmo persimmon phi phi3
phimoe qwen2 qwen2_moe qwen3 qwen3_moe seed_oss starcoder2 stablelm gpt_neox glm4_moe minimax_m2
qwen3_next nemotron gpt_oss solar_open
"""
_INTERLEAVED = "cohere ernie4_5 ernie4_5_moe helium glm glm4"
# What configs leave out, where it is not base 1e4 and all of a head.
_THETA = {
    **{"apertus": 1.2e7, "bitnet": 5e5, "cwm": 1e6, "mixtral": 1e6, "nomic_bert": 1e3},
    **{"flex_olmo": 5e5, "olmo3": 5e5, "phimoe": 1e6, "minimax_m2": 5e6, "gpt_oss": 1.5e5},
    **{"solar_open": 1e6, "cohere": 5e5, "ernie4_5": 5e5, "ernie4_5_moe": 5e5, "helium": 1e5},
}
_FRACTION = {
    **{"persimmon": 0.5, "phi": 0.5, "stablelm": 0.25, "gpt_neox": 0.25, "glm4_moe": 0.5},
    **{"qwen3_next": 0.25, "nemotron": 0.5, "glm": 0.5, "glm4": 0.5},
}


def _plain(names: str, layout: str) -> dict[str, Family]:
    return {n: Plain(layout, _THETA.get(n, 1e4), _FRACTION.get(n, 1.0)) for n in names.split()}


MODEL_TYPES: dict[str, Family] = {
    **_plain(_HALF, "half"),
    **_plain(_INTERLEAVED, "interleaved"),
    "beam": Plain(instead=QueryTemperature(form="beam", length=2048)),
    "cohere2": Plain("interleaved", bare=("full_attention",)),
    "exaone4": rotary.exaone4,
    "exaone_moe": rotary.exaone4,
    "gemma3_text": Plain(theta=1e6, local_theta=1e4),
    "gemma4_text": Plain(theta=1e6, local_theta=1e4),
    "modernbert": Plain(theta=1.6e5, local_theta=1e4),
    "llama4_text": rotary.llama4,
    "smollm3": rotary.smollm3,
    "gptj": rotary.gptj,
    "codegen": rotary.gptj,
    "roformer": other.roformer,
    "ministral3": rotary.ministral3,
    "deepseek_v2": Latent(interleave=True, in_place=True),
    "deepseek_v3": Latent(),
    "deepseek_v32": Latent(),
    "mistral4": Latent(),
    "mistral_large4_text": rotary.mistral_large4,
    "qwen2_vl_text": Multimodal(theta=1e6, sections=(16, 24, 24)),
    "qwen2_5_vl_text": Multimodal(theta=1e6, sections=(16, 24, 24)),
    "qwen3_vl_text": Multimodal("interleaved", theta=5e5, sections=(24, 20, 20)),
    "qwen3_vl_moe_text": Multimodal("interleaved", theta=5e5, sections=(24, 20, 20)),
    "ernie4_5_vl_moe_text": Multimodal(
        "alternating", "interleaved", 5e5, sections=(22, 22, 20), time_last=True
    ),
    "t5": Buckets(),
    "mt5": Buckets(),
    "umt5": Buckets(own=True),
    "bloom": other.bloom,
    "mpt": other.mpt,
    "falcon": other.falcon,
    "deberta-v2": other.deberta_v2,
    "xlnet": other.xlnet,
    "wav2vec2-bert": other.wav2vec2_bert,
    "inkling_text": other.inkling,
    "gpt2": Table(),
    "bert": Table(),
    "opt": Table(offset=2),
    "roberta": Table(reserved=True),
    "whisper": other.whisper,
    "pixtral": Grid(1e4, (("frequencies", "dealt"),)),
    "dinov3_vit": Grid(100.0, ()),
    "swin": other.swin,
    "swinv2": other.swin_v2,
}
