"""The page of a released model: loss by place, text, and speed. It loads nothing."""

from collections.abc import Mapping

from markupsafe import escape

import posenc_jax as pe
from experiments.models.methods import seen
from experiments.models.schemes import as_code
from experiments.pages.page import as_html, details, pair, picture, plain, table
from experiments.released.measure import Measured
from experiments.released.plan import Plan


def render(plan: Plan, measured: Measured, command: str, machine: Mapping[str, object]) -> str:
    """Returns the page of a plan and its results; `machine` is of `environment`."""
    by_place = measured.by_place
    heads, rows = by_place.table() if by_place else ([], [])
    beyond = by_place is not None and by_place.count > by_place.trained
    caption = f"Means of {by_place.smooth} tokens" if by_place else ""
    caption += "; dotted: the trained length" if beyond else ""
    legend = "Nats per token, lower is better; the lowest of a column is bold."
    legend += " †: beyond the trained length." if beyond else ""
    methods = {(name, x): None for name, layers in plan.layers.items() for x in layers}
    blocks = [
        f"# {plain(plan.name)}",
        f"{plain(plan.facts)}.",
        f"    {command}",
        *map(plain, plan.notes),
    ]
    if by_place:
        rows_of = [[name, f"`{as_code(x.scheme)}`", _seen(x)] for name, x in methods]
        blocks += [
            "## Loss by place",
            f"{by_place.count:,} tokens of {plain(by_place.text)} in one pass with the same "
            "weights, with other encodings and windows in all layers.",
            "\n".join(f"* {plain(sentence)}" for sentence in by_place.sentences()),
            pair(
                picture("loss.svg", caption),
                f"{table(['method', *heads], _bold(rows))}\n\n{legend}",
            ),
            table(["method", "in this library", "tokens that it sees"], rows_of, words=3),
        ]
    if measured.text:
        text = str(escape(measured.text)).replace("\n", "<br>")
        blocks += [
            "## Text",
            f"The {plan.new} likeliest tokens, one by one from the cache, after the bold ones.",
            f"<p><b>{escape(plan.prompt)}</b>{text}</p>",
        ]
    blocks += [
        "## Speed",
        table(["slots", "tokens/s", "ms a token"], measured.speeds, words=0),
        "One row in float32, when all slots of the cache are full: "
        f"{plain(machine['processor'])}, {machine['cores']} cores, {plain(machine['device'])}.",
        plain(measured.same),
        details("Environment", [f"{name} = {value}" for name, value in machine.items()]),
    ]
    text = "\n\n".join(filter(None, blocks)) + "\n"
    return as_html(text, {"loss.svg": by_place.picture()} if by_place else {})


def _seen(layer: pe.LayerSpec) -> str:
    """The tokens that a token sees, in words."""
    if layer.window is None:
        return "all"
    first = getattr(layer.scheme, "first", 0)
    return (f"the first {first} and " if first else "") + f"the last {seen(layer):,}"


def _bold(rows: list[list[str]]) -> list[list[str]]:
    """Returns a table with the lowest number of each column in bold.

    >>> _bold([["rope", "10.5"], ["yarn", "9.5"]])
    [['rope', '10.5'], ['yarn', '**9.5**']]
    """
    best = [min(column, key=float) for column in list(zip(*rows, strict=True))[1:]]
    return [
        [name, *(f"**{x}**" if x == b else x for x, b in zip(row, best, strict=True))]
        for name, *row in rows
    ]
