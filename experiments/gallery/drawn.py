"""Draws the pictures of docs/drawn.md from the arrays of its code."""

import hashlib
import inspect
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

from experiments.gallery import drawings
from experiments.gallery.page import STRIP, strip
from experiments.gallery.probe import probe
from experiments.pages.plots import STYLE, drawing, standalone
from experiments.runs.files import write_whole
from experiments.settings.config_io import Parser

_DOCS = Path(__file__).parents[2] / "docs"
CODE = r"^```python\n(?P<code>.*?)^```\n"
PICTURE = r"^!\[(?P<alt>[^\]]*)\]\(drawn/(?P<name>\w+)\.svg\)$"
# A picture sets its ink and its background together, so it is readable on a page of any colour.
LIGHT_AND_DARK = """
 <style>
  svg { color: #1b1f24; background: #ffffff }
  @media (prefers-color-scheme: dark) { svg { color: #e4e7eb; background: #14171b } }
 </style>"""


def main(arguments: list[str]) -> int:
    parser = Parser(
        prog="python -m experiments drawn",
        description="Runs the code of docs/drawn.md, draws its arrays to docs/drawn/*.svg, and "
        "writes docs/strip.png.",
    )
    parser.parse_args(arguments)
    text = (_DOCS / "drawn.md").read_text(encoding="utf-8")
    files: dict[Path, str | bytes] = {
        _DOCS / "drawn" / f"{name}.svg": svg for name, svg in draw(text).items()
    }
    files[_DOCS / "strip.png"] = strip([probe(name) for name in STRIP])
    for target, content in files.items():
        write_whole(target, content)
        print(target)
    return 0


def draw(text: str) -> dict[str, str]:
    """Returns the pictures of a page as SVG, by name.

    The code runs from top to bottom. At a picture, the function of its name in `drawings` draws
    the variables that its parameters name.
    """
    variables: dict[str, Any] = {"__name__": "drawn"}
    digests, pictures = digest(text), {}
    for match in re.finditer(f"{CODE}|{PICTURE}", text, re.MULTILINE | re.DOTALL):
        name = match["name"]
        if name is None:
            exec(match["code"], variables)
            continue
        style: dict[Any, Any] = {**STYLE, "font.size": 11, "axes.titlesize": "medium"}
        with mpl.rc_context({**style, "svg.hashsalt": name}):
            figure = _function(name)(*(variables[x] for x in _parameters(name)))
            for patch in (figure.patch, *(axes.patch for axes in figure.axes)):
                patch.set_alpha(0.0)
            svg = standalone(drawing(figure, name, match["alt"]), ink="currentColor")
        pictures[name] = svg.replace(">", f">{LIGHT_AND_DARK}\n <!-- {digests[name]} -->", 1)
    return pictures


def digest(text: str) -> dict[str, str]:
    """Returns a digest, for each picture, of the code before it and of the code that draws it."""
    code, digests = "", {}
    for match in re.finditer(f"{CODE}|{PICTURE}", text, re.MULTILINE | re.DOTALL):
        if match["name"] is None:
            code += match["code"]
        else:
            source = code + inspect.getsource(_function(match["name"]))
            digests[match["name"]] = hashlib.sha256(source.encode()).hexdigest()[:16]
    return digests


def _function(name: str):
    return getattr(drawings, f"draw_{name}")


def _parameters(name: str) -> list[str]:
    return list(inspect.signature(_function(name)).parameters)
