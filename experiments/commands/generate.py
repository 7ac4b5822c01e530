"""`python -m experiments generate`: text from a trained model, beyond its trained length too."""

import functools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text as Words

from experiments.errors import ConfigError, ResultsError
from experiments.models.model import LanguageModel
from experiments.models.schemes import with_scaling
from experiments.runs import trained
from experiments.runs.experiment import Experiment
from experiments.settings.config_io import Parser, near
from experiments.settings.trust import add_trust
from experiments.tasks.text import VARIANTS, Text

_PER_CALL = 16
_EPILOG = """\
python -m experiments train --tasks text --schemes rope,alibi --name mine
python -m experiments generate results/mine --scheme rope --prompt "The people " --bytes 400
python -m experiments generate results/mine --prompt "We " --prompt "In the year " --temperature 0
python -m experiments generate results/mine --scheme rope --scaling ntk --bytes 1000

Prompts of different lengths are one batch. With --scaling the frequencies are those for the whole
length. A vertical bar marks where the text passes the trained length.
"""


def main(arguments: list[str]) -> int:
    """Prints text as it is sampled; returns the exit status."""
    parser = Parser(
        prog="python -m experiments generate",
        description="Samples bytes from a model that `python -m experiments train` made.",
        epilog=_EPILOG,
    )
    parser.add_argument("folder", type=Path, help="results of the training")
    parser.add_argument("--scheme", help="one of its schemes (default: the first)")
    parser.add_argument("--prompt", action="append", help="text to continue; may be repeated")
    parser.add_argument("--bytes", type=int, default=200, help="how many to add (default: 200)")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: the most probable (default: 0.8)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the samples (default: 0)")
    parser.add_argument("--scaling", help=f"frequency map: {' or '.join(VARIANTS)}")
    add_trust(parser)
    options = parser.parse_args(arguments)
    prompts = [prompt.encode() for prompt in options.prompt or ["\n"]]
    if not all(prompts):
        raise ConfigError("--prompt: must hold at least one byte")
    if options.bytes < 1:
        raise ConfigError(f"--bytes: must be at least 1, got {options.bytes}")
    if not 0 <= options.temperature < float("inf"):
        raise ConfigError(f"--temperature: must be 0 or above, got {options.temperature}")
    total = max(map(len, prompts)) + options.bytes
    experiment = trained.experiment_of(options.folder, options.trust)
    task, model = _load(experiment, options.scheme, options.scaling, total)
    key = jax.random.key(options.seed)
    parts = generate(model, prompts, options.bytes, options.temperature, key)
    _show(parts, prompts, options.bytes, task.train_length)
    return 0


def generate(
    model: LanguageModel,
    prompts: Sequence[bytes],
    count: int,
    temperature: float,
    key: jax.Array,
) -> Iterator[np.ndarray]:
    """Yields sampled bytes uint8 [prompts, any], `count` per prompt.

    Args:
      model: predicts bytes.
      prompts: of any lengths, at least one byte each.
      count: how many bytes follow.
      temperature: divides the logits; 0 takes the greatest.
      key: of the samples.

    Raises:
      ResultsError: if the logits are not finite, as beyond the rows of a learned table.
    """
    longest = max(map(len, prompts))
    rows = [np.frombuffer(prompt, np.uint8) for prompt in prompts]
    tokens = np.stack([np.pad(row, (longest - len(row), 0)) for row in rows]).astype(np.int32)
    first = np.array([[longest - len(row)] for row in rows])
    place = np.arange(longest)[None] - first
    graphdef, params = nnx.split(model)
    caches = model.new_caches(len(prompts), longest + count)
    options = {"graphdef": graphdef, "temperature": temperature}
    logits, caches = _prefill(params, tokens, place.astype(np.int32), caches, graphdef=graphdef)
    done = 0
    while done < count:
        steps = min(_PER_CALL, count - done)
        key, sample_key = jax.random.split(key)
        sampled, logits, caches = _sample(
            params, logits, caches, sample_key, steps=steps, **options
        )
        done += steps
        if not bool(jnp.isfinite(logits).all()):
            raise ResultsError(
                f"the logits are not finite by byte {longest + done}; the scheme does not reach "
                "that far"
            )
        yield np.asarray(sampled).T


@functools.partial(jax.jit, static_argnames="graphdef", donate_argnames="caches")
def _prefill(params: Any, tokens: Any, place: Any, caches: Any, *, graphdef: Any) -> Any:
    """Returns the logits after each prompt, for tokens whose place is below zero for padding."""
    model, ids = nnx.merge(graphdef, params), jnp.where(place < 0, -1, 0)
    logits, caches = model.decode(tokens, caches, jnp.maximum(place, 0), ids)
    return logits[:, -1], caches


@functools.partial(
    jax.jit, static_argnames=("graphdef", "temperature", "steps"), donate_argnames="caches"
)
def _sample(
    params: Any,
    logits: jax.Array,
    caches: Any,
    key: jax.Array,
    *,
    graphdef: Any,
    temperature: float,
    steps: int,
) -> Any:
    """Returns bytes uint8 [steps, B], the logits of the next and the caches."""
    model = nnx.merge(graphdef, params)

    def step(carry, key):
        logits, caches = carry
        if temperature == 0:
            token = logits.argmax(-1)
        else:
            token = jax.random.categorical(key, logits / temperature)
        logits, caches = model.decode(token[:, None].astype(jnp.int32), caches)
        return (logits[:, -1], caches), token.astype(jnp.uint8)

    (logits, caches), sampled = jax.lax.scan(step, (logits, caches), jax.random.split(key, steps))
    return sampled, logits, caches


def _load(
    experiment: Experiment, scheme: str | None, scaling: str | None, total: int
) -> tuple[Text, LanguageModel]:
    """Returns the task and the trained model of the first seed."""
    task = experiment.tasks.get("text")
    if not isinstance(task, Text):
        others = ", ".join(experiment.tasks)
        raise ConfigError(f"{experiment.folder}: holds no model of text, but {others}")
    scheme = experiment.schemes[0] if scheme is None else scheme
    params = trained.parameters(experiment, task.name, scheme)
    position = experiment.scheme("text", scheme)
    if scaling is not None:
        if scaling not in VARIANTS:
            raise ConfigError(f"--scaling: unknown map {scaling!r}{near(scaling, VARIANTS)}")
        factor = max(1.0, total / task.train_length)
        scaled = with_scaling(position, VARIANTS[scaling](factor))
        if scaled is None:
            raise ConfigError(f"--scaling: {scheme} has no frequencies to change")
        position = scaled
    return task, trained.model(task, position, params)


def _show(
    parts: Iterator[np.ndarray], prompts: Sequence[bytes], count: int, trained_length: int
) -> None:
    """Shows the texts as they grow, and the speed."""
    console, texts = Console(), [bytearray(prompt) for prompt in prompts]
    first, began, done = 0, time.perf_counter(), 0

    def picture(words: str) -> Group:
        return Group(*(_marked(text, trained_length) for text in texts), Words(words, style="dim"))

    with Live(picture("compiling"), console=console, auto_refresh=False) as live:
        for part in parts:
            for text, new in zip(texts, part, strict=True):
                text.extend(new.tobytes())
            done += part.shape[1]
            if not first:  # The first part holds the compilation.
                first, began = done, time.perf_counter()
            rate = (done - first) * len(prompts) / max(time.perf_counter() - began, 1e-9)
            speed = f", {rate:.0f} bytes/s" if done > first else ""
            live.update(picture(f"{done} of {count} bytes{speed}"), refresh=True)


def _marked(text: bytes | bytearray, trained_length: int) -> Words:
    """The text with a bar where it passes the trained length."""
    head, tail = (
        part.decode("utf-8", "replace") for part in (text[:trained_length], text[trained_length:])
    )
    return Words.assemble(head, ("|", "bold red") if tail else "", tail)
