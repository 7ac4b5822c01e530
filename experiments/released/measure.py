"""The measurements of a plan for a released model, each printed when it has been made."""

import concurrent.futures
import dataclasses
import importlib.util
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from examples.checkpoints import Checkpoint
from examples.decoder import Decoder
from experiments.models.methods import seen
from experiments.pages.tables import aligned
from experiments.released import equality
from experiments.released.by_place import ByPlace
from experiments.released.losses import compiled, set_method
from experiments.released.plan import SLOTS, Plan
from experiments.released.speed import Steps
from experiments.runs.environment import usable_cores
from experiments.runs.run import duration
from experiments.runs.run_queue import say

_CLEAR = "\r\033[K" if sys.stdout.isatty() else ""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Results.

    Attributes:
      text: the continuation of the prompt.
      speeds: slots, tokens per second and milliseconds a token, as printed.
      same: the differences to transformers, in words.
      by_place: the losses, None where there are none.
    """

    text: str
    speeds: list[list[str]]
    same: str
    by_place: ByPlace | None


def measure(checkpoint: Checkpoint, model: Decoder, plan: Plan) -> Measured:
    """Returns all results."""
    steps = Steps(model)
    written = _written(checkpoint.tokenizer, steps, plan) if checkpoint.tokenizer else ""
    speeds = _speeds(steps, plan)
    same = _equality(checkpoint, model, plan) if len(plan.tokens) else ""
    by_place = _by_place(model, plan) if plan.layers else None
    return Measured(written, speeds, same, by_place)


def _written(tokenizer: Any, steps: Steps, plan: Plan) -> str:
    """The likeliest continuation of the prompt."""
    say(f"\n{plan.new} tokens, one by one from the cache:\n")
    print(plan.prompt, end="", flush=True)
    tokens, written = tokenizer.encode(plan.prompt).ids, ""
    for part in _text(tokenizer, tokens, steps.write(tokens, plan.new, SLOTS[0])):
        print(part, end="", flush=True)
        written += part
    say("")
    return written


def _text(tokenizer: Any, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yields the text of tokens after a prompt as soon as their bytes are whole characters."""
    ids, shown = [*prompt], len(tokenizer.decode(prompt))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)


def _speeds(steps: Steps, plan: Plan) -> list[list[str]]:
    """Slots, tokens per second and milliseconds a token."""
    say("\nTokens per second, one row, when the cache is full:")
    speeds = []
    for slots in sorted({min(slots, plan.trained) for slots in SLOTS}):
        seconds = steps.seconds(slots)
        speeds.append([f"{slots:,}", f"{1 / seconds:.1f}", f"{1e3 * seconds:.3g}"])
        say("  {} slots: {} ({} ms a token)".format(*speeds[-1]))
    return speeds


def _equality(checkpoint: Checkpoint, model: Decoder, plan: Plan) -> str:
    """The differences to transformers in words, or how to get them."""
    tokens = plan.tokens[: min(512, plan.trained)]
    sentence = f"For the differences to transformers' logits: {equality.INSTALL}"
    if all(map(importlib.util.find_spec, ("torch", "transformers"))):
        say("\nThe same logits from transformers ...")
        try:
            theirs = equality.logits_of_transformers(checkpoint.config, checkpoint.state, tokens)
            graph, state = nnx.split(model)
            logits = jax.jit(lambda state, x: nnx.merge(graph, state)(x))
            ours = logits(state, jnp.asarray(tokens[None]))
            sentence = equality.compare(np.asarray(ours[0]), theirs, tokens)
        except Exception as error:  # Of any kind: types that it does not know, or knows otherwise.
            reason = next(iter(str(error).splitlines()), type(error).__name__)
            sentence = f"No differences to transformers' logits: {reason}"
    say(f"\n{sentence}")
    return sentence


def _by_place(model: Decoder, plan: Plan) -> ByPlace:
    """The losses of the text by place."""
    by_place = ByPlace(plan.text, plan.trained, _losses(model, plan))
    heads, rows = by_place.table()
    say("\n".join(["", *aligned([["nats per token", *heads], *rows]), ""]))
    say("\n".join(by_place.sentences()))
    return by_place


def _losses(model: Decoder, plan: Plan) -> dict[str, np.ndarray]:
    """The losses by method; on CPUs two methods run at a time, and compile while the other runs."""
    count, began = plan.count, time.monotonic()
    say(f"\nLoss of {count:,} tokens of {plan.text}, {', '.join(plan.layers)}:")
    costs = {name: _cost(model, plan, layers) for name, layers in plan.layers.items()}
    workers = 2 if jax.default_backend() == "cpu" and usable_cores() > 1 else 1

    def measured(model: Decoder) -> tuple[np.ndarray, float]:
        start = time.monotonic()
        scores = compiled(model, count + 1)(plan.tokens[: count + 1])
        return scores.losses, time.monotonic() - start

    def remaining() -> str:
        """The time left, by how long the methods before took."""
        if not done:
            return ""
        share = sum(costs[name] for name in done) / sum(costs.values())
        seconds = work / share / workers - (time.monotonic() - began)
        return f", about {duration(seconds)} left" if seconds > 5.0 else ""

    models = {name: nnx.merge(*nnx.split(model)) for name in plan.layers}
    for name, layers in plan.layers.items():
        set_method(models[name], *layers)
    pool, done, work = concurrent.futures.ThreadPoolExecutor(workers), {}, 0.0
    waiting = {pool.submit(measured, each): name for name, each in models.items()}
    while waiting:
        ended, _ = concurrent.futures.wait(waiting, 1.0, concurrent.futures.FIRST_COMPLETED)
        passed = duration(time.monotonic() - began)
        for future in ended:
            name = waiting.pop(future)
            done[name], seconds = future.result()
            work += seconds
            mean = f"{done[name].mean():.3f} nats per token"
            say(f"{_CLEAR}  {name}: {mean}, {passed}{remaining() if waiting else ''}")
        if not ended and sys.stdout.isatty():
            print(f"{_CLEAR}  {passed}{remaining()}", end="", flush=True)
    pool.shutdown()
    return {name: done[name] for name in plan.layers}


def _cost(model: Decoder, plan: Plan, layers: Sequence[pe.LayerSpec]) -> float:
    """Products of a pass: of weights, and of the pairs of queries and keys that are seen."""
    config, count = model.config, plan.count
    pairs = sum(count * min(count / 2, seen(layer)) for layer in layers)
    return count * plan.parameters + 2 * config.num_heads * config.head_dim * pairs
