"""`python -m experiments attention`: where trained models look, by distance."""

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib as mpl
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

import posenc_jax as pe
from experiments.errors import ConfigError
from experiments.gallery.probe import log_weights
from experiments.models.model import Block, LanguageModel, seed_keys
from experiments.pages import plots
from experiments.pages.tables import label
from experiments.runs import trained
from experiments.runs.files import write_whole
from experiments.runs.run_queue import say
from experiments.settings.config_io import Parser, names, near

_PER_OCTAVE = 6
_LEAST = -12.0
"""Keys with less added to their logits get next to no weight."""
_EPILOG = """\
python -m experiments train --tasks text --schemes rope,alibi,t5,none --name mine
python -m experiments attention results/mine
python -m experiments attention results/mine --schemes rope,alibi --length 1024

A row of the picture is a layer, a line is a head: the mean share of its attention that a token at
each distance gets, over queries in the second half of sequences of that length. Sequences are those
of training. Beyond the dotted line there were none. Where all that a scheme does is
to add to logits, a second picture has what it adds, relative to the query's own token.
"""


def main(arguments: list[str]) -> int:
    """Writes the picture; returns the exit status."""
    parser = Parser(
        prog="python -m experiments attention",
        description="Draws attention against distance of models that were trained.",
        epilog=_EPILOG,
    )
    parser.add_argument("folder", type=Path, help="results of the training")
    parser.add_argument("--task", help="one of its tasks (default: the first)")
    parser.add_argument("--schemes", type=names, metavar="A,B", help="default: all")
    parser.add_argument("--length", type=int, help="default: 8 times the trained length")
    parser.add_argument("--sequences", type=int, default=4, help="how many (default: 4)")
    parser.add_argument("--out", type=Path, help="SVG file (default: attention.svg in the folder)")
    options = parser.parse_args(arguments)
    experiment = trained.experiment_of(options.folder)
    name = next(iter(experiment.tasks)) if options.task is None else options.task
    if name not in experiment.tasks:
        raise ConfigError(f"--task: {name!r} is not there{near(name, experiment.tasks)}")
    task = experiment.tasks[name]
    length = 8 * task.train_length if options.length is None else options.length
    if length < 4 or options.sequences < 1:
        raise ConfigError("--length must be at least 4 and --sequences at least 1")
    (key,) = seed_keys([0], "test")
    tokens, _ = task.sample(key, options.sequences, length, task.load().train)
    found, learned = {}, {}
    for scheme in options.schemes or experiment.schemes:
        params = trained.parameters(experiment, task.name, scheme)
        model = trained.model(task, experiment.scheme(name, scheme), params)
        found[scheme] = by_distance(model, tokens[:, :-1])
        if (added := biases(model, length // 2)) is not None:
            learned[scheme] = added
        say(f"{label(scheme)}: measured")
    target = options.out or options.folder / "attention.svg"
    write_whole(target, plots.standalone(picture(found, task.train_length)))
    say(f"Picture: {target}")
    if learned:
        target = target.with_name(f"{target.stem}-biases.svg")
        write_whole(
            target, plots.standalone(picture(learned, task.train_length, "added to logits"))
        )
        say(f"Picture: {target}")
    return 0


def by_distance(model: LanguageModel, tokens: jax.Array) -> np.ndarray:
    """Returns mean attention weights [layers, N, T // 2] by distance, for tokens [B, T].

    Means are over queries in the second half, which all have keys at these distances.
    """
    graphdef, params = nnx.split(model)
    return np.asarray(_by_distance(params, tokens, graphdef=graphdef))


@functools.partial(jax.jit, static_argnames="graphdef")
def _by_distance(params: Any, tokens: jax.Array, *, graphdef: Any) -> jax.Array:
    model, length = nnx.merge(graphdef, params), tokens.shape[1]
    query = jnp.arange(length - length // 2, length)
    key = query[:, None] - jnp.arange(length // 2)[None]
    found = []
    for weights in attention_weights(model, tokens):
        near = jnp.take_along_axis(weights[:, query], key[None, :, None, :], axis=3)
        found.append(near.mean((0, 1)))
    return jnp.stack(found)


def attention_weights(model: LanguageModel, tokens: jax.Array) -> list[jax.Array]:
    """Returns the weights [B, T, N, T] of each layer, for tokens [B, T]."""
    x, found = model.embed(tokens) * model.embed_scale, []
    for position in model.positions:
        x = position(x)
    for block in model.blocks:
        found.append(_weights(block, x))
        x = block(x)
    return found


def _weights(block: Block, x: jax.Array) -> jax.Array:
    """The weights of a layer: its output where values are unit vectors, one per key."""
    layer, found = block.attention, []
    value, out = layer.value, layer.out
    units = jnp.broadcast_to(
        jnp.eye(x.shape[1])[None, :, None], (*x.shape[:2], layer.num_kv_heads, x.shape[1])
    )

    def record(weights: jax.Array, **_: Any) -> jax.Array:
        found.append(weights)
        return jnp.zeros_like(x)

    layer.value, layer.out = (lambda *_, **__: units), record
    block(x)
    layer.value, layer.out = value, out
    return found[0]


def biases(model: LanguageModel, length: int) -> np.ndarray | None:
    """Returns what each layer's scheme adds to logits [layers, N, length] by distance.

    None where it does anything else. Tokens are all alike.
    """
    found = []
    for block in model.blocks:
        layer = block.attention
        scheme = layer.encoding.scheme
        if scheme.acts != pe.Acts.LOGITS:
            return None
        sizes = {n: getattr(layer, n) for n in ("num_heads", "head_dim", "model_dim")}
        added = log_weights(scheme, length, layer.encoding.values(), sizes=sizes)
        found.append(added[:, -1, ::-1])
    return np.stack(found)


def picture(found: Mapping[str, np.ndarray], train_length: int, what: str = "weight") -> str:
    """Returns a grid of plots as <svg>: a row per layer, a column per scheme, a line per head.

    Args:
      found: by scheme, what `by_distance` or `biases` returns.
      train_length: where the dotted line is.
      what: is drawn; the axis of "weight" is logarithmic.
    """
    layers = max(len(x) for x in found.values())
    title = f"Attention against distance: {what}"
    with mpl.rc_context({**plots.STYLE, "svg.hashsalt": title, "font.size": 8.0}):
        figure = Figure(figsize=(0.6 + 1.75 * len(found), 0.6 + 1.5 * layers), layout="constrained")
        figure.patch.set_alpha(0.0)
        grid = figure.subplots(layers, len(found), sharex=True, sharey=True, squeeze=False)
        for column, (scheme, weights) in enumerate(found.items()):
            for layer, heads in enumerate(weights):
                axes = grid[layer, column]
                axes.patch.set_alpha(0.0)
                for i, head in enumerate(heads):
                    at, mean = _smooth(head)
                    axes.plot(at, mean, color=plots.PALETTE[i % len(plots.PALETTE)], linewidth=1.2)
                axes.set_xscale("log", base=2)
                axes.set_yscale("log" if what == "weight" else "linear")
                axes.axvline(train_length, color=plots.INK, linestyle=":", linewidth=1.0, alpha=0.7)
            grid[0, column].set_title(label(scheme), fontsize=9.0)
        for layer in range(layers):
            grid[layer, 0].set_ylabel(f"layer {layer + 1}\n{what}")
        for axes in grid[-1]:
            axes.set_xlabel("distance + 1")
        if what == "weight":
            least = min(np.nanmin(x[x > 0]) for x in found.values())
            grid[0, 0].set_ylim(max(least / 2, 1e-6), 1.3)
        elif min(np.nanmin(x) for x in found.values()) < _LEAST:
            grid[0, 0].set_ylim(bottom=1.05 * _LEAST)
        return plots.drawing(figure, "attention", title)


def _smooth(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns distances + 1 and mean weights, with fewer points at larger distances."""
    at = np.arange(1, len(weights) + 1)
    place = np.round(np.log2(at) * _PER_OCTAVE).astype(int)
    _, index = np.unique(place, return_inverse=True)
    count = np.bincount(index)
    return np.bincount(index, at) / count, np.bincount(index, weights) / count
