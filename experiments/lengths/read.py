"""Carries out a pass: a model reads the tokens of a document."""

import functools
import hashlib
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

import posenc_jax as pe
from examples import checkpoints, families
from examples.decoder import Decoder
from experiments.errors import ConfigError, CorpusError
from experiments.lengths import texts
from experiments.lengths.plan import Cell, Checkpoint
from experiments.lengths.results import BIN, CellResult
from experiments.released.losses import Scores, compiled, set_method
from experiments.released.packages import packaged
from experiments.runs.run import commit, here, now


@functools.lru_cache(maxsize=1)
def opened(about: Checkpoint, file: Path | None) -> tuple[Decoder, Any]:
    """Returns the model of a checkpoint and its tokenizer, read once by a process."""
    path = file or packaged(about.requirement, "*.gguf", "the checkpoint")
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise ConfigError(f"checkpoint: {path}: cannot be read: {error.strerror}") from None
    if digest != about.sha256:
        raise ConfigError(
            f"checkpoint: {path} is another file than that of {about.requirement} "
            f"(sha256 {digest[:16]}, not {about.sha256[:16]})"
        )
    try:
        checkpoint = checkpoints.read(path)
    except (ValueError, ImportError) as error:
        raise ConfigError(f"checkpoint: {error}") from None
    if checkpoint.tokenizer is None:
        raise ConfigError(f"checkpoint: {checkpoint.tokenizer_error}")
    config = checkpoint.config
    layers, length = pe.from_hf(config), config.get("max_position_embeddings")
    if layers != about.layers or length != about.trained:
        raise ConfigError(
            f"checkpoint: has {_words(layers)} trained at {length} tokens, the plan says "
            f"{_words(about.layers)} and {about.trained}"
        )
    return families.load(config, checkpoint.state), checkpoint.tokenizer


def measure(cell: Cell) -> CellResult:
    model, tokenizer = opened(cell.checkpoint, cell.file)
    probe, tokens = None, _tokens(cell, tokenizer)
    if cell.probe:
        probe = texts.new_probe(tokens.tolist(), tokenizer, cell.document.name, cell.probe)
        tokens = probe.tokens
    set_method(model, *cell.layers)
    program, began = compiled(model, len(tokens)), time.process_time()
    scores = program(tokens, probe.scored if probe else True)
    seconds = time.process_time() - began
    return CellResult(
        settings=cell.settings,
        losses=[] if probe else scores.losses.reshape(-1, BIN).mean(1).tolist(),
        questions=_answers(probe, scores) if probe else [],
        copies=_copied(probe, scores) if probe else [],
        cpu_seconds=round(seconds, 2),
        compile_seconds=round(program.seconds, 2),
        temporary_mib=round(program.temporary_bytes / 2**20, 1),
        peak_mib=round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, 1),
        environment=here(),
        commit=commit(),
        finished=now(),
    )


def _words(layers: Sequence[pe.LayerSpec]) -> str:
    return f"{len(layers)} layers of {', '.join(map(repr, dict.fromkeys(layers)))}"


def _tokens(cell: Cell, tokenizer: Any) -> np.ndarray:
    """The first tokens of the document, int32: N of a probe, of losses one more."""
    document, count = cell.document, cell.count + (cell.probe is None)
    text = texts.read(document.corpus, document.name)
    tokens = tokenizer.encode(text, add_special_tokens=False).ids
    if len(tokens) < count:
        raise CorpusError(
            f"{document.corpus}: {document.name} has {len(tokens):,} tokens, {count:,} are needed"
        )
    return np.array(tokens[:count], np.int32)


def _answers(probe: texts.Probe, scores: Scores) -> list[tuple[float, float, float, float, float]]:
    """The scores of answers; the token at place i has the score i - 1."""
    rows = []
    for x in probe.questions:
        part = slice(x.start - 1, x.start - 1 + x.count)
        loss, hit = float(scores.losses[part].sum()), float(scores.hits[part].all())
        rows.append((float(x.context), x.depth, float(x.distance), loss, hit))
    return rows


def _copied(probe: texts.Probe, scores: Scores) -> list[tuple[float, float, float]]:
    rows = []
    for x in probe.copies:
        first, second = (
            float(scores.losses[place - 1 : place - 1 + x.count].mean())
            for place in (x.first, x.second)
        )
        rows.append((float(x.distance), first, second))
    return rows
