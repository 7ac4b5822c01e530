"""Model types that `from_hf` reads, and the reasons for which it refuses others.

A model type is one row in the `ROWS` of `rotary_types.py` or `other_types.py`. A row is a
`ModelType`, made of the readers that its family shares; its key has one or several names. Biases,
scale and QK-norm need no setting where the config class has a key for them. To add one,

1. Copy the row of the model type that is most alike, and change the settings that its modeling file
   changes: layout, layers that rotate or have a window, biases, norms of queries and keys, scale.
   Write a reader only where no setting fits. A new key goes into `keys.toml`.
2. `python -m tests.makers hf_configs` writes `defaults.json`, which has bases, sizes and windows
   that a config leaves out, and the cases of raw configs; `python -m tests.makers hf_layers CONFIG`
   adds layers of a small model of transformers. The tests compare both.

A model type is included if it is in a release of transformers, and a scheme of this library and a
`LayerSpec` describe each layer: the tests of its layers need no code of their own.
"""

from posenc_jax.hf import other_types, rotary_types

_ROWS = rotary_types.ROWS | other_types.ROWS
MODEL_TYPES = {name: row for names, row in _ROWS.items() for name in names.split()}

_NOT_READ = {
    "it has no attention": "falcon_mamba mamba mamba2 rwkv xlstm",
    "its attention is the difference of two softmaxes": "diffllama",
    "its mask depends on values": "doge",
    "its queries attend to random blocks of keys": "big_bird bigbird_pegasus",
    "its queries attend to keys in buckets of hashes": "reformer",
    "its decoder predicts several tokens with streams of their own": "prophetnet",
    "it has convolutions of queries and keys": "zaya",
    "its layers have attention and Mamba side by side": "falcon_h1",
    "some of its layers attend from text to images": "mllama mllama_text_model",
    "it has several transformers, over bytes and over patches": "blt",
    "experts project its queries": "jetmoe",
    "it attends to the keys of another model": "gemma4_assistant gemma4_unified_assistant",
    "a part of its keys has a norm of its own": "dots3_note dots3_note_text",
    "each kind of its layers has M-RoPE of its own": "cohere_compass_text",
    "its biases also depend on segments": "cpmant",
    "it has two stacks of layers that run in turns": "hrm_text",
    "only its cache has a window": "moshi",
    "its sines and cosines begin at position 2": "xglm",
    "its cosines precede its sines": "musicgen musicgen_melody",
    "its config has the keys of a decoder alone": "trocr",
    "its first token has angles that are learned": "mlcd_vision_model",
}

NOT_READ = {name: reason for reason, names in _NOT_READ.items() for name in names.split()}
"""Model types of transformers 5.24 that are not read, with the reasons.

`tests/hf/test_raw_configs.py` checks that every other causal language model is read.
"""
