"""Makes the golden files: python -m tests.makers models [NAME ...], with the group parity.

Each model of transformers has random weights and runs in float64: the logits of a left-padded
batch, 64 greedy steps by `generate`, and the logits of every eighth of them.
"""

import numpy as np
import torch
import transformers

from examples import encoders
from tests.makers.hf_models import about, in_double
from tests.models.agreement import (
    FOLDER,
    IMAGE,
    VOCABULARY,
    images,
    pictures,
    prompts,
    random_state,
)

STEPS, EVERY = 64, 8
GREEDY = {"do_sample": False, "max_new_tokens": STEPS}
SIZES = dict(
    vocab_size=VOCABULARY,
    hidden_size=48,
    num_attention_heads=6,
    num_hidden_layers=2,
    intermediate_size=80,
    max_position_embeddings=128,
)
GROUPED = SIZES | dict(hidden_size=36, num_key_value_heads=2, head_dim=8)
GPT2 = dict(vocab_size=VOCABULARY, n_embd=48, n_head=6, n_layer=2, n_positions=128)
SCALED = {"factor": 4.0, "original_max_position_embeddings": 32, "rope_theta": 1e4}
LLAMA3 = SCALED | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
HOT = SCALED | {"rope_type": "yarn", "llama_4_scaling_beta": 0.5}
MIXED = dict(
    num_local_experts=4,
    num_experts_per_tok=2,
    sliding_window=7,
    rope_parameters=SCALED | {"rope_type": "yarn", "truncate": False},
)
THREE = dict(
    num_hidden_layers=3,
    layer_types=["sliding_attention", "sliding_attention", "full_attention"],
    sliding_window=7,
)
PHI3 = dict(
    num_key_value_heads=2,
    sliding_window=11,
    rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75},
)
T5 = dict(vocab_size=VOCABULARY, d_model=36, d_kv=8, num_heads=6, num_layers=2, d_ff=80)
NARROW = SIZES | dict(hidden_size=24, num_attention_heads=3, intermediate_size=40)
DISTILBERT = dict(vocab_size=VOCABULARY, dim=24, n_heads=3, n_layers=2, hidden_dim=40)
DISTILBERT |= dict(max_position_embeddings=128)
DEBERTA = SIZES | dict(
    type_vocab_size=0,
    relative_attention=True,
    pos_att_type=["c2p", "p2c"],
    share_att_key=True,
    norm_rel_ebd="layer_norm",
    position_buckets=4,
    max_relative_positions=8,
    position_biased_input=False,
)
DEEPSEEK = SIZES | dict(
    num_key_value_heads=6,
    first_k_dense_replace=1,
    q_lora_rank=28,
    kv_lora_rank=20,
    qk_nope_head_dim=10,
    qk_rope_head_dim=6,
    v_head_dim=12,
    n_routed_experts=8,
    n_group=4,
    topk_group=2,
    num_experts_per_tok=3,
    moe_intermediate_size=24,
    n_shared_experts=2,
    rope_parameters=SCALED | {"rope_type": "yarn", "mscale": 0.7, "mscale_all_dim": 0.9},
)
DIRECT = dict(q_lora_rank=None, num_hidden_layers=1)
QWEN_VL = dict(
    text_config=SIZES
    | dict(
        num_key_value_heads=2,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4} | {"mrope_section": [1, 1, 2]},
    ),
    vision_config=dict(
        depth=2, embed_dim=32, hidden_size=48, num_heads=2, mlp_ratio=2, patch_size=2, in_channels=2
    ),
    **dict(image_token_id=IMAGE, video_token_id=41, vision_start_token_id=42),
    vision_end_token_id=43,
)
SWIN = dict(
    image_size=24,
    patch_size=2,
    embed_dim=24,
    depths=[2, 2, 2],
    num_heads=[3, 6, 6],
    window_size=3,  # All of the last stage, where no block shifts.
    num_labels=5,
)
# Model type, settings, seed of the weights: the best two logits of a step are not close.
CASES = {
    "gpt2": ("gpt2", GPT2, 5),
    "gpt_neox": ("gpt_neox", SIZES | dict(rotary_pct=0.5), 5),
    "llama3": ("llama", GROUPED | dict(rope_parameters=LLAMA3), 0),
    "llama_yarn": ("llama", GROUPED | dict(rope_parameters=SCALED | {"rope_type": "yarn"}), 0),
    "mistral": ("mistral", GROUPED | dict(sliding_window=11), 6),
    "ministral3": ("ministral3", GROUPED | dict(rope_parameters=HOT), 0),
    "gpt_oss": ("gpt_oss", GROUPED | MIXED, 6),
    "qwen2": ("qwen2", SIZES | dict(num_key_value_heads=2), 6),
    "qwen3": ("qwen3", GROUPED, 5),
    "smollm3": ("smollm3", SIZES | dict(num_key_value_heads=2, no_rope_layer_interval=2), 5),
    "phi3": ("phi3", SIZES | PHI3, 5),
    "gemma2": ("gemma2", GROUPED | dict(sliding_window=7, attn_logit_softcapping=5.0), 8),
    "gemma3": ("gemma3_text", GROUPED | THREE | dict(query_pre_attn_scalar=16), 6),
    "bloom": ("bloom", dict(vocab_size=VOCABULARY, hidden_size=48, n_head=6, n_layer=2), 5),
    "deepseek_v3": ("deepseek_v3", DEEPSEEK, 0),
    "deepseek_v3_q": ("deepseek_v3", DEEPSEEK | DIRECT, 0),
    "t5": ("t5", T5, 4),
    "t5_gated": ("t5", T5 | dict(feed_forward_proj="gated-gelu", tie_word_embeddings=False), 1),
    "deberta_v2": ("deberta-v2", DEBERTA, 0),
    "bert": ("bert", SIZES | dict(pad_token_id=0), 0),
    "roberta": ("roberta", NARROW | dict(type_vocab_size=1), 0),
    "xlm_roberta": ("xlm-roberta", NARROW | dict(type_vocab_size=1), 0),
    "camembert": ("camembert", NARROW | dict(type_vocab_size=1), 0),
    "electra": ("electra", NARROW | dict(embedding_size=16), 0),
    "distilbert": ("distilbert", DISTILBERT, 0),
    "mpnet": ("mpnet", NARROW, 0),
    "jina_v3": ("jina_embeddings_v3", NARROW, 0),
    "nomic_bert": ("nomic_bert", NARROW | dict(head_dim=12), 0),
    "gte": ("gte", NARROW, 0),
    "qwen2_vl": ("qwen2_vl", QWEN_VL, 0),
    "swin": ("swin", SWIN, 0),
}


def load(model, seed):
    """Gives a model its random weights; returns their shapes."""
    tied, tensors = set(model.all_tied_weights_keys), [*model.named_parameters()]
    tensors += [(n, b) for n, b in model.named_buffers() if n.endswith("correction_bias")]
    shapes = {n: tuple(p.shape) for n, p in tensors if n not in tied}
    state = random_state(shapes, seed)
    missing, unexpected = model.load_state_dict(
        {n: torch.from_numpy(x).double() for n, x in state.items()}, strict=False
    )
    assert not unexpected and not set(missing) & set(shapes)
    model.tie_weights()
    return shapes


def batch():
    tokens, mask = map(torch.from_numpy, prompts())
    return {"input_ids": tokens, "attention_mask": mask.long()}


def decoder(model):
    inputs = batch()
    whole = model.generate(**inputs, **GREEDY)
    mask = torch.nn.functional.pad(inputs["attention_mask"], (0, STEPS), value=1)
    inputs = {"input_ids": whole, "attention_mask": mask}
    if model.config.model_type != "bloom":
        inputs["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return whole, model(**inputs, use_cache=False).logits


def encoder_decoder(model):
    whole = model.generate(**batch(), **GREEDY)
    return whole, model(**batch(), decoder_input_ids=whole, use_cache=False).logits


def with_images(model):
    model.generation_config.eos_token_id = None
    tokens, mask, patches, grids = images()
    tokens, mask = torch.from_numpy(tokens), torch.from_numpy(mask).long()
    grids = torch.tensor([grid for row in grids for grid in row])
    inputs = {"pixel_values": torch.from_numpy(patches).double(), "image_grid_thw": grids}
    kinds = (tokens == IMAGE).int()
    options = inputs | {"attention_mask": mask, "mm_token_type_ids": kinds}
    whole = model.generate(input_ids=tokens, **options, **GREEDY)
    model.model.rope_deltas = None
    pad = torch.nn.functional.pad
    options["attention_mask"] = pad(mask, (0, STEPS), value=1)
    options["mm_token_type_ids"] = pad(kinds, (0, STEPS))
    return whole, model(input_ids=whole, **options, use_cache=False).logits


def encoder(model):
    return None, model(**batch()).logits


def hidden_states(model):
    """The last hidden states as logits; BERT by itself counts padding as positions."""
    inputs, first = batch(), getattr(model.embeddings, "padding_idx", -1) + 1
    positions = (inputs["attention_mask"].cumsum(-1) - 1).clamp(min=0) + first
    return None, model(**inputs, position_ids=positions).last_hidden_state


def classifier(model):
    return None, model(torch.from_numpy(pictures()).movedim(3, 1)).logits


NO_END = {"pad_token_id": 0, "eos_token_id": None}
DECODER = "AutoModelForCausalLM", NO_END | {"bos_token_id": None}, decoder
# The class of transformers, settings of its config, and what is run.
RUNS = {
    "t5": ("AutoModelForSeq2SeqLM", NO_END | {"decoder_start_token_id": 0}, encoder_decoder),
    "deberta-v2": ("AutoModelForMaskedLM", {"pad_token_id": 0}, encoder),
    "qwen2_vl": ("AutoModelForImageTextToText", {}, with_images),
    "swin": ("AutoModelForImageClassification", {}, classifier),
} | dict.fromkeys(encoders.FAMILIES, ("AutoModel", {}, hidden_states))


def check(name, logits, new):
    """Prints the least gap between the best two logits of a step, and how many tokens differ."""
    steps = logits[:, -STEPS:]
    assert np.array_equal(steps.argmax(-1), new)
    best = np.sort(steps, -1)
    gap = (best[..., -1] - best[..., -2]).min()
    print(f"{name}: gap {gap:.4f}, {[len(set(row)) for row in new.tolist()]} tokens", flush=True)


def make(name):
    """{"about": json, array name: array} of a case."""
    model_type, settings, seed = CASES[name]
    auto, special, run = RUNS.get(model_type, DECODER)
    with in_double(), torch.no_grad():
        config = transformers.CONFIG_MAPPING[model_type](**settings, **special)
        if run in (decoder, encoder_decoder, with_images):
            config._attn_implementation = "eager"
        if run is decoder:
            config._experts_implementation = "eager"
        for part in (config, config.text_config) if run is with_images else ():
            part.pad_token_id, part.bos_token_id, part.eos_token_id = 0, None, None
        model = getattr(transformers, auto).from_config(config).eval()
        shapes = load(model, seed)
        whole, logits = (None if x is None else x.numpy() for x in run(model))
    tokens, mask = (images if model_type == "qwen2_vl" else prompts)()[:2]
    arrays = {"tokens": tokens.astype(np.int32), "mask": mask}
    if whole is not None:
        new, logits = whole[:, -STEPS:], logits[:, :-1]
        check(name, logits, new)
        prompt = logits.shape[1] - STEPS + 1
        places = [*range(prompt), *range(prompt + EVERY - 1, logits.shape[1], EVERY)]
        arrays |= {"new": new.astype(np.uint8), "at": np.array(places, np.int32)}
        logits = logits[:, places]
    described = about(config, shapes=shapes, seed=seed)
    return {"about": described, "logits": logits.astype(np.float32)} | arrays


def main(argv):
    for name in argv or CASES:
        np.savez_compressed(FOLDER / f"{name}.npz", **make(name))
