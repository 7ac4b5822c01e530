"""Draws the pictures of docs/drawn.md from the arrays of its code, and writes its notebook."""

import hashlib
import inspect
import re
from pathlib import Path
from typing import Any

import matplotlib as mpl

from experiments.errors import ConfigError, ExperimentError
from experiments.gallery import drawings
from experiments.pages.plots import STYLE, drawing, standalone
from experiments.runs.files import write_whole
from experiments.settings.config_io import Parser

CODE = r"^```python\n(?P<code>.*?)^```\n"
PICTURE = r"^!\[(?P<alt>[^\]]*)\]\(drawn/(?P<name>\w+)\.svg\)$"
# A picture sets its ink and its background together, so it is readable on a page of any colour.
LIGHT_AND_DARK = """
 <style>
  svg { color: #1b1f24; background: #ffffff }
  @media (prefers-color-scheme: dark) { svg { color: #e4e7eb; background: #14171b } }
 </style>"""
SETUP = """# The package, if it is not installed, and the functions that draw the pictures.
try:
    import posenc_jax
except ImportError:
    %pip install -q posenc_jax
%matplotlib inline

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle
"""


def main(arguments: list[str]) -> int:
    """Draws the page; returns the exit status."""
    parser = Parser(
        prog="python -m experiments drawn",
        description="Runs the code of docs/drawn.md and draws its arrays to docs/drawn/*.svg.",
    )
    parser.add_argument("--page", type=Path, default=Path("docs/drawn.md"), help="Markdown file")
    parser.add_argument(
        "--notebook", type=Path, help="run the page as a notebook and write that instead"
    )
    options = parser.parse_args(arguments)
    try:
        text = options.page.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--page: {options.page}: {error.strerror}") from None
    if options.notebook is not None:
        write_whole(options.notebook, notebook(text))
        print(options.notebook)
        return 0
    for name, svg in draw(text).items():
        target = options.page.with_suffix("") / f"{name}.svg"
        write_whole(target, svg)
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


def notebook_page(text: str) -> str:
    """Returns the page as Markdown with the functions that draw, and a call for each picture."""

    def call(match: re.Match) -> str:
        name = match["name"]
        return f"```python\n{_function(name).__name__}({', '.join(_parameters(name))})\n```"

    functions = [x for x in vars(drawings).values() if inspect.isfunction(x)]
    setup = "\n\n".join([SETUP, *(inspect.getsource(function) for function in functions)])
    title, rest = re.sub(PICTURE, call, text, flags=re.MULTILINE).split("\n", 1)
    return f"{title}\n\n```python\n{setup}```\n{rest}"


def notebook(text: str) -> str:
    """Returns the page as a notebook that has run."""
    try:
        import jupytext
        import nbclient
    except ModuleNotFoundError as error:
        raise ConfigError(f"--notebook: {error}; run make notebook") from None
    book = jupytext.reads(notebook_page(text), fmt="md")
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    book.metadata = {"kernelspec": kernel}
    for number, cell in enumerate(book.cells):
        cell.id = f"cell-{number}"  # The same bytes in every run.
    hidden = next(cell for cell in book.cells if cell.cell_type == "code")
    hidden.metadata = {"jupyter": {"source_hidden": True}, "cellView": "form"}
    try:
        nbclient.NotebookClient(book, kernel_name="python3", record_timing=False).execute()
    except nbclient.exceptions.CellExecutionError as error:
        raise ExperimentError(f"--notebook: {error.ename}: {error.evalue}") from None
    return jupytext.writes(book, fmt="ipynb")


def _function(name: str):
    return getattr(drawings, f"draw_{name}")


def _parameters(name: str) -> list[str]:
    return list(inspect.signature(_function(name)).parameters)
