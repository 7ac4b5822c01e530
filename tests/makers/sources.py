"""The authors' files that golden files are made from, their numbers, and the writing of files."""

import json
import pathlib

import numpy as np

_SWIN = "microsoft/Swin-Transformer", "f82860bfb5225915aca09c3227159ee9e1df874d"
_BAM = "ArthurSBianchessi/BAM", "5a6579d9cb0a15e14fbb240078e7494292a1815f"
SOURCES = {
    "alibi": (
        "ofirpress/attention_with_linear_biases",
        "4b92f28a005ead2567abe2359f633e73e08f3833",
        "fairseq/models/transformer.py",
    ),
    "t5": (
        "tensorflow/mesh",
        "da907937e68aa421186f1178d71eb5f736fcb069",
        "mesh_tensorflow/transformer/transformer_layers.py",
    ),
    "t2t": (
        "tensorflow/tensor2tensor",
        "bafdc1b67730430d38d6ab802cbd51f9d053ba2e",
        "tensor2tensor/layers/common_attention.py",
    ),
    "neox": (
        "EleutherAI/gpt-neox",
        "ea7aefd8f8e183256992d9fede4d7c71a46d67a5",
        "megatron/model/positional_embeddings.py",
    ),
    "gptj": (
        "kingoflolz/mesh-transformer-jax",
        "f8315e3003033b23f21d78361b288953064e0e76",
        "mesh_transformer/layers.py",
    ),
    "swin": (*_SWIN, "models/swin_transformer.py"),
    "swin_v2": (*_SWIN, "models/swin_transformer_v2.py"),
    "mae": (
        "facebookresearch/mae",
        "efb2a8062c206524e35e47d04501ed4f544c0ae8",
        "util/pos_embed.py",
    ),
    "fourier": (
        "willGuimont/learnable_fourier_positional_encoding",
        "1fe87e28b41616bad875d2eeb3a488dfe3fbf698",
        "src/learnable_fourier_positional_encoding/learnable_fourier_pos_encoding.py",
    ),
    "tupe": (
        "guolinke/TUPE",
        "4c64ff748a7039be4918429f05bbb43d81357107",
        "fairseq/modules/transformer_sentence_encoder.py",
    ),
    "canon": (
        "facebookresearch/PhysicsLM4",
        "75806965208c55e9f7f2e2363d3793d2da75d2e4",
        "huggingface/canon_helper.py",
    ),
    "modded_nanogpt": (
        "KellerJordan/modded-nanogpt",
        "f411b3d346aa52d3504324ca93c230fd84c6c07f",
        "train_gpt.py",
    ),
    "cable": ("axiomlab/Cable", "8bc6b83e872899c50827e6940344350c37fadaa8", "src/Cable.py"),
    "bam": (*_BAM, "models/bam.py"),
    "bam_inference": (*_BAM, "inference_models/bam.py"),
}
"""Repository, commit and path of each file."""


def source_text(folder, source):
    """Returns the text of a file, from the clone of its repository in `folder`."""
    repository, _, path = SOURCES[source]
    return (folder / repository.split("/")[1] / path).read_text()


def origin(source):
    return "{} at {}, {}".format(*SOURCES[source])


def rounded(x):
    """Returns nested lists of numbers with nine significant digits."""
    return np.vectorize(lambda a: float(f"{a:.9g}"))(np.asarray(x)).tolist()


def write(name, content):
    path = pathlib.Path(__file__).parents[1] / "golden" / f"{name}.json"
    path.write_text(json.dumps(content) + "\n")


def make_files(argv, *makers):
    """Writes one file for each function, or for the functions named after the folder of clones."""
    folder, *names = argv
    folder = pathlib.Path(folder)
    for make in makers:
        if not names or make.__name__ in names:
            write(make.__name__, make(folder))
