"""`python -m experiments attention`: attention of trained models against distance."""

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
from experiments.settings.trust import add_trust

_PER_OCTAVE = 6
_LEAST = -12.0
"""Keys with lower biases get next to no weight."""
_EPILOG = """\
python -m experiments train --tasks text --schemes rope,alibi,t5,none --name mine
python -m experiments attention results/mine
python -m experiments attention results/mine --schemes rope,alibi --length 1024

A row of the picture is a layer, a line is a head: the mean share of its attention that a token at
each distance gets, over queries in the second half of sequences of that length. Sequences are those
of training, none of which reached beyond the dotted line. If a scheme only adds to logits, a second
picture has its biases, relative to the bias of the query's token.
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
    add_trust(parser)
    options = parser.parse_args(arguments)
    experiment = trained.experiment_of(options.folder, options.trust)
    name = next(iter(experiment.tasks)) if options.task is None else options.task
    if name not in experiment.tasks:
        raise ConfigError(f"--task: {name!r} is not there{near(name, experiment.tasks)}")
    task = experiment.tasks[name]
    length = 8 * task.train_length if options.length is None else options.length
    if length < 4 or options.sequences < 1:
        raise ConfigError("--length must be at least 4 and --sequences at least 1")
    (key,) = seed_keys([0], "test")
    tokens, _ = task.sample(key, options.sequences, length, task.load().train)
    weights, learned = {}, {}
    for scheme in options.schemes or experiment.schemes:
        params = trained.parameters(experiment, task.name, scheme)
        model = trained.model(task, experiment.scheme(name, scheme), params)
        weights[scheme] = by_distance(model, tokens[:, :-1])
        if (added := biases(model, length // 2)) is not None:
            learned[scheme] = added
        say(f"{label(scheme)}: measured")
    target = options.out or options.folder / "attention.svg"
    write_whole(target, plots.standalone(picture(weights, task.train_length)))
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
    means = []
    for weights in attention_weights(model, tokens):
        near = jnp.take_along_axis(weights[:, query], key[None, :, None, :], axis=3)
        means.append(near.mean((0, 1)))
    return jnp.stack(means)


def attention_weights(model: LanguageModel, tokens: jax.Array) -> list[jax.Array]:
    """Returns the weights [B, T, N, T] of each layer, for tokens [B, T]."""
    x, weights = model.embed(tokens) * model.embed_scale, []
    for position in model.positions:
        x = position(x)
    for block in model.blocks:
        weights.append(_weights(block, x))
        x = block(x)
    return weights


def _weights(block: Block, x: jax.Array) -> jax.Array:
    """Returns the weights of a layer: its output for values that are unit vectors, one per key."""
    layer, recorded = block.attention, []
    value, out = layer.value, layer.out
    units = jnp.broadcast_to(
        jnp.eye(x.shape[1])[None, :, None], (*x.shape[:2], layer.num_kv_heads, x.shape[1])
    )

    def record(weights: jax.Array, **_: Any) -> jax.Array:
        recorded.append(weights)
        return jnp.zeros_like(x)

    layer.value, layer.out = (lambda *_, **__: units), record
    block(x)
    layer.value, layer.out = value, out
    return recorded[0]


def biases(model: LanguageModel, length: int) -> np.ndarray | None:
    """Returns the biases of each layer's scheme [layers, N, length] by distance.

    None if a scheme does anything but add to logits. All tokens are equal.
    """
    by_layer = []
    for block in model.blocks:
        layer = block.attention
        scheme = layer.encoding.scheme
        if scheme.acts != pe.Acts.LOGITS:
            return None
        sizes = {n: getattr(layer, n) for n in ("num_heads", "head_dim", "model_dim")}
        added = log_weights(scheme, length, layer.encoding.values(), sizes=sizes)
        by_layer.append(added[:, -1, ::-1])
    return np.stack(by_layer)


def picture(values: Mapping[str, np.ndarray], train_length: int, title: str = "weight") -> str:
    """Returns a grid of plots as <svg>: a row per layer, a column per scheme, a line per head.

    Args:
      values: by scheme, of `by_distance` or `biases`.
      train_length: position of the dotted line.
      title: of the values; the axis of "weight" is logarithmic.
    """
    layers = max(len(x) for x in values.values())
    label_of_plot = f"Attention against distance: {title}"
    with mpl.rc_context({**plots.STYLE, "svg.hashsalt": label_of_plot, "font.size": 8.0}):
        figure = Figure(
            figsize=(0.6 + 1.75 * len(values), 0.6 + 1.5 * layers), layout="constrained"
        )
        figure.patch.set_alpha(0.0)
        grid = figure.subplots(layers, len(values), sharex=True, sharey=True, squeeze=False)
        for column, (scheme, weights) in enumerate(values.items()):
            for layer, heads in enumerate(weights):
                axes = grid[layer, column]
                axes.patch.set_alpha(0.0)
                for i, head in enumerate(heads):
                    distances, mean = _smooth(head)
                    colour = plots.PALETTE[i % len(plots.PALETTE)]
                    axes.plot(distances, mean, color=colour, linewidth=1.2)
                axes.set_xscale("log", base=2)
                axes.set_yscale("log" if title == "weight" else "linear")
                axes.axvline(train_length, color=plots.INK, linestyle=":", linewidth=1.0, alpha=0.7)
            grid[0, column].set_title(label(scheme), fontsize=9.0)
        for layer in range(layers):
            grid[layer, 0].set_ylabel(f"layer {layer + 1}\n{title}")
        for axes in grid[-1]:
            axes.set_xlabel("distance + 1")
        if title == "weight":
            least = min(np.nanmin(x[x > 0]) for x in values.values())
            grid[0, 0].set_ylim(max(least / 2, 1e-6), 1.3)
        elif min(np.nanmin(x) for x in values.values()) < _LEAST:
            grid[0, 0].set_ylim(bottom=1.05 * _LEAST)
        return plots.drawing(figure, "attention", label_of_plot)


def _smooth(weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns distances + 1 and mean weights, with fewer points at larger distances."""
    distances = np.arange(1, len(weights) + 1)
    place = np.round(np.log2(distances) * _PER_OCTAVE).astype(int)
    _, index = np.unique(place, return_inverse=True)
    count = np.bincount(index)
    return np.bincount(index, distances) / count, np.bincount(index, weights) / count
