"""How well the models in `examples` agree with transformers.

`python -m tests.models.agreement` writes docs/models_agreement.csv; `makers/models.py` makes the
files that it reads. Prompts, and random weights, which depend on names and shapes alone, are drawn
again.
"""

import csv
import pathlib
import zlib

import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples import deberta, decoder, deepseek, encoders, families, qwen2_vl, swin, t5
from tests.support import recorded

FOLDER = pathlib.Path(__file__).with_name("golden")
TABLE = pathlib.Path(__file__).parents[2] / "docs" / "models_agreement.csv"
ENCODERS = """
bert roberta xlm_roberta camembert electra distilbert mpnet jina_v3 nomic_bert gte
""".split()
NAMES = """
gpt2 gpt_neox bloom llama3 llama_yarn mistral ministral3 qwen2 qwen3 smollm3 phi3 gpt_oss
gemma2 gemma3 deepseek_v3 deepseek_v3_q qwen2_vl t5 t5_gated deberta_v2 swin
""".split()
NAMES += ENCODERS
LOAD = {"deberta_v2": deberta.load, "qwen2_vl": qwen2_vl.load, "swin": swin.load}
LOAD |= dict.fromkeys(("t5", "t5_gated"), t5.load) | dict.fromkeys(ENCODERS, encoders.load)
LOAD |= dict.fromkeys(("deepseek_v3", "deepseek_v3_q"), deepseek.load)
LOAD |= dict.fromkeys((n for n in NAMES if n not in LOAD), families.load)
VOCABULARY, LENGTHS = 44, (9, 6, 3)
IMAGE, PATCH_DIM, MERGE = 40, 16, 2
# Frames, rows and columns of the images of each row, in patches; four are a token.
GRIDS = (((1, 4, 6),), ((1, 4, 4), (1, 2, 2)), ())


def prompts(seed=0):
    """Tokens [B, T], padded on the left with 0, and their mask."""
    draws = np.random.RandomState(seed)
    length = max(LENGTHS)
    tokens = draws.randint(1, VOCABULARY, (len(LENGTHS), length))
    mask = np.arange(length) >= length - np.array(LENGTHS)[:, None]
    return tokens * mask, mask


def images(seed=0):
    """Tokens with images, their mask, the patches of all images, and the grids of each row."""
    draws = np.random.RandomState(seed)
    rows = []
    for grids in GRIDS:
        row = [*draws.randint(1, IMAGE, 2)]
        for time, height, width in grids:
            row += [IMAGE] * (time * height * width // MERGE**2) + [*draws.randint(1, IMAGE, 2)]
        rows.append(np.array(row))
    length = max(map(len, rows))
    tokens = np.stack([np.pad(row, (length - len(row), 0)) for row in rows])
    count = sum(np.prod(grid) for grids in GRIDS for grid in grids)
    patches = draws.standard_normal((count, PATCH_DIM)).astype(np.float32)
    return tokens, tokens > 0, patches, GRIDS


def pictures(seed=0):
    """Pictures [B, rows, columns, channels]."""
    return np.random.RandomState(seed).standard_normal((2, 24, 24, 3))


def random_state(shapes, seed=0):
    """{name: float32 array} of a state dict, from {name: shape}.

    `RandomState` draws the same numbers in every version of NumPy.
    """
    return {name: _draw(name, tuple(shape), seed) for name, shape in shapes.items()}


def _draw(name, shape, seed):
    draws = np.random.RandomState((zlib.crc32(name.encode()) + seed) % 2**32)
    x = draws.standard_normal(shape).astype(np.float32)
    if len(shape) == 1:
        return 0.2 * x + (0.0 if name.endswith("bias") else 1.0)
    gain = 1.0 if "emb" in name or "wte" in name else 2.2
    if name.endswith(".q.weight"):  # T5's, which initialises them so and has no factor on q . k.
        gain /= 8**0.5
    return x * np.float32(gain * shape[-1] ** -0.5)


def read(name):
    """Returns the description of a file, its arrays, and the weights of the model."""
    about, arrays = recorded(FOLDER / f"{name}.npz")
    return about, arrays, random_state(about["shapes"], about["seed"])


def load(name, **changes):
    """The model with its weights, and `changes` of its config."""
    about, _, state = read(name)
    return LOAD[name](about["config"] | changes, state)


def agreement(name):
    """The greatest difference of logits, and the number of greedy steps with the same tokens.

    They are counted up to the first that differs in any row; None of a model that does not decode.
    """
    about, arrays, state = read(name)
    model = LOAD[name](about["config"], state)
    tokens, mask = (jnp.asarray(arrays[n]) for n in ("tokens", "mask"))
    if "new" not in arrays:
        inputs = (jnp.asarray(pictures(), jnp.float32),) if name == "swin" else (tokens, mask)
        logits = nnx.jit(lambda model, *inputs: model(*inputs))(model, *inputs)
        difference = np.abs(logits - arrays["logits"])
        return float((difference if name == "swin" else difference[mask]).max()), None
    steps, (*_, patches, grids) = arrays["new"].shape[1], images()

    @nnx.jit
    def run(model, tokens, mask, patches):
        if name == "qwen2_vl":
            return qwen2_vl.generate(model, tokens, steps, mask, patches, grids, with_logits=True)
        if name.startswith("t5"):
            return t5.greedy(model, tokens, mask, steps)
        return decoder.generate(model, tokens, steps, mask=mask, with_logits=True)

    new, logits = run(model, tokens, mask, jnp.asarray(patches))
    mask = mask[:, -1:] if name.startswith("t5") else mask  # One token before the first.
    mask = np.pad(mask, ((0, 0), (0, steps - 1)), constant_values=True)
    difference = np.abs(np.asarray(logits)[:, arrays["at"]] - arrays["logits"])
    same = np.all(np.asarray(new) == arrays["new"], axis=0)
    equal = steps if same.all() else int(np.argmin(same))
    return float(difference[mask[:, arrays["at"]]].max()), equal


def write():
    """Measures all models, and writes the table."""
    rows = [
        ("case", "model type", "greatest difference of logits", "greedy steps with equal tokens")
    ]
    for name in NAMES:
        error, steps = agreement(name)
        kind = read(name)[0]["config"]["model_type"]
        rows.append((name, kind, f"{error:.0e}", "-" if steps is None else steps))
    with TABLE.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


if __name__ == "__main__":
    write()
