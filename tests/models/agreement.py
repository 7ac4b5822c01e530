"""How well the models in `examples` agree with transformers.

`python -m tests.models.agreement` prints the table in docs/models.md; `makers/models.py` makes the
files that it reads.
"""

import pathlib

import jax.numpy as jnp
import numpy as np
from flax import nnx

from examples import deberta, decoder, deepseek, families, qwen2_vl, swin, t5
from tests.models.inputs import images, pictures
from tests.models.weights import random_state
from tests.support import recorded

FOLDER = pathlib.Path(__file__).with_name("golden")
NAMES = """
gpt2 gpt_neox bloom llama3 llama_yarn mistral ministral3 qwen2 qwen3 gpt_oss gemma2 gemma3
deepseek_v3 deepseek_v3_q qwen2_vl t5 t5_gated deberta_v2 swin
""".split()


def read(name):
    """Returns the description of a file, its arrays, and the weights of the model."""
    about, arrays = recorded(FOLDER / f"{name}.npz")
    return about, arrays, random_state(about["shapes"], about["seed"])


def agreement(name):
    """The greatest difference of logits, and the number of greedy steps with the same tokens.

    None steps of a model that does not decode.
    """
    about, arrays, state = read(name)
    config = about["config"]
    if name == "swin":
        run = nnx.jit(lambda model, *inputs: model(*inputs))
        logits = run(swin.load(config, state), jnp.asarray(pictures(), jnp.float32))
        return float(np.abs(logits - arrays["logits"]).max()), None
    tokens, mask = (jnp.asarray(arrays[n]) for n in ("tokens", "mask"))
    if name == "deberta_v2":
        run = nnx.jit(lambda model, *inputs: model(*inputs))
        logits = run(deberta.load(config, state), tokens, mask)
        return float(np.abs(logits - arrays["logits"])[mask].max()), None
    steps = arrays["new"].shape[1]
    if name == "qwen2_vl":
        *_, patches, grids = images()
        model = qwen2_vl.load(config, state)
        run = nnx.jit(qwen2_vl.greedy, static_argnums=(3, 5))
        return compare(arrays, *run(model, tokens, mask, steps, jnp.asarray(patches), grids), mask)
    if name.startswith("t5"):
        run = nnx.jit(t5.greedy, static_argnums=3)
        outputs = run(t5.load(config, state), tokens, mask, steps)
        return compare(arrays, *outputs, mask[:, -1:])  # One token before the first.
    run = nnx.jit(decoder.greedy, static_argnums=3)
    load = deepseek.load if name.startswith("deepseek") else families.load
    return compare(arrays, *run(load(config, state), tokens, mask, steps), mask)


def compare(arrays, new, logits, mask):
    """As `agreement`, with the steps up to the first that differs in any row."""
    steps = arrays["new"].shape[1]
    mask = np.pad(mask, ((0, 0), (0, steps - 1)), constant_values=True)
    difference = np.abs(np.asarray(logits)[:, arrays["at"]] - arrays["logits"])
    same = np.all(np.asarray(new) == arrays["new"], axis=0)
    equal = steps if same.all() else int(np.argmin(same))
    return float(difference[mask[:, arrays["at"]]].max()), equal


def table():
    """The rows of docs/models.md."""
    yield "| case | model type | greatest difference of logits | greedy steps with equal tokens |"
    yield "|---|---|---|---|"
    for name in NAMES:
        error, steps = agreement(name)
        kind = read(name)[0]["config"]["model_type"]
        yield f"| {name} | `{kind}` | {error:.0e} | {'-' if steps is None else steps} |"


if __name__ == "__main__":
    print("\n".join(table()))
