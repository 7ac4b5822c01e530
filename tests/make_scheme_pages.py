"""Writes the parts of the documentation that follow from the code of a scheme.

    PYTHONPATH=.:tests python tests/make_scheme_pages.py NAME [NAME ...]

For each scheme: the facts in the table of README.md (a new row for a new scheme) and the row of
docs/serving.md, which takes 15 s. For all of them: the number of schemes in README.md, the list of
schemes with kernels in docs/kernels.md, and docs/gallery.png, in three minutes.
`tests/test_layout.py` calls `missing` for each scheme.
"""

import argparse
import dataclasses
import functools
import importlib
import pathlib
import re
import sys
import textwrap

import jax
from cache import make_serving
from PIL import Image
from support import build, make_batch, output

import posenc_jax as pe
from experiments.__main__ import main as experiments
from posenc_jax.engine.blocks import Blocks
from posenc_jax.engine.tpu.implementation import PallasTPU

ROOT = pathlib.Path(__file__).parents[1]
PACKAGE = ROOT / "posenc_jax"
README, SERVING, KERNELS, SHEET = (
    ROOT / path for path in ("README.md", "docs/serving.md", "docs/kernels.md", "docs/gallery.png")
)
FAMILIES = ("additive", "rotary", "bias", "content", "logit_scale")


def scheme_classes() -> list[type[pe.Scheme]]:
    """Returns the scheme classes of all files of the families, exported or not."""
    classes = []
    for path in sorted(p for f in FAMILIES for p in (PACKAGE / "schemes" / f).rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for cls in vars(importlib.import_module(name)).values():
            if isinstance(cls, type) and issubclass(cls, pe.Scheme):
                classes += [cls] if cls.name and cls.__module__ == name else []
    return classes


def facts(cls: type[pe.Scheme]) -> list[str]:
    """Returns three cells of a scheme's row in README.md: acts on, learned, relative.

    >>> facts(pe.T5)
    ['logits', 'yes', 'yes']
    """
    scheme = build(cls)
    learned = jax.tree.leaves(jax.eval_shape(scheme.init, jax.random.key(0)))
    return [str(scheme.acts), *("yes" if x else "no" for x in (learned, scheme.traits.relative))]


def row(cls: type[pe.Scheme], text: str) -> str:
    """Returns a scheme's row in README.md: its facts, with paper and remarks from `text`."""
    link = paper(cls)
    source = f"[arXiv {link[1]}]({link[0]})" if link else ""
    cells = [f"`{cls.name}`", f"`{cls.__name__}`", "", "", "", source]
    if old := re.search(rf"(?m)^\| (`{cls.name}` \|.*) \|$", text):
        cells = old[1].split(" | ")
    return f"| {' | '.join([*cells[:2], *facts(cls), *cells[5:]])} |\n"


@functools.cache
def has_kernels(cls: type[pe.Scheme]) -> bool:
    """Returns whether "pallas" on a TPU runs the scheme."""
    tiles = Blocks(128, 128)
    options = {"implementation": PallasTPU(tiles, tiles, interpret=True)}
    scheme = build(cls)
    tokens = make_batch(length=40)
    params = jax.eval_shape(scheme.init, jax.random.key(0))
    try:
        jax.eval_shape(lambda params, x: output(scheme, params, x, **options), params, tokens)
    except NotImplementedError:
        return False
    return True


def paper(cls: type[pe.Scheme]) -> re.Match | None:
    """Returns the match of the first link in a module's docstring; group 1 is the arXiv number."""
    doc = sys.modules[cls.__module__].__doc__ or ""
    return re.search(r"https://arxiv\.org/abs/([\d.]+\d)", doc)


def missing(cls: type[pe.Scheme]) -> list[str]:
    """Returns a line for each part that a scheme lacks in package, tests and documentation."""
    family, file = cls.__module__.split(".")[2:]
    init, name = "posenc_jax/__init__.py", cls.__name__
    test = ROOT / f"tests/schemes/{family}/test_{file}.py"
    text = test.read_text() if test.exists() else ""
    settings = [f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING]
    values = ", ".join(f'"{setting}": ...' for setting in settings)
    options = f"OPTIONS = {{pe.{name}: {{{values}}}}}, another value of each setting"
    checks = [
        (paper(cls), f"posenc_jax/schemes/{family}/{file}.py: a link to arxiv.org/abs"),
        (hasattr(pe, name), f"{init}: from {cls.__module__} import {name} as {name}"),
        (re.search(rf"\b{name}\b", str(pe.__doc__)), f"{init}: {name} in the docstring"),
        (text, f"{test.relative_to(ROOT)}: a test with numbers from outside"),
        (not settings or f"pe.{name}: {{" in text, f"{test.relative_to(ROOT)}: {options}"),
    ]
    lines = [line for present, line in checks if not present]
    pages = {
        "its row in README.md": row(cls, README.read_text()) in README.read_text(),
        "its row in docs/serving.md": f"\n| `{cls.name}` |" in SERVING.read_text(),
        "the list in docs/kernels.md": (cls.name in listed()) == has_kernels(cls),
        "its picture in docs/gallery.png": cls.name in pictured(),
    }
    if absent := [page for page, present in pages.items() if not present]:
        command = f"PYTHONPATH=.:tests python tests/make_scheme_pages.py {cls.name}"
        lines.append(f"{command} writes {', '.join(absent)}")
    return lines


LIST = r"Schemes that run:(.*?)\.\s"


def listed() -> list[str]:
    """Returns the names in the list of docs/kernels.md."""
    return re.findall(r"`(\w+)`", re.search(LIST, KERNELS.read_text(), re.DOTALL)[1])


@functools.cache
def pictured() -> list[str]:
    """Returns the names in the text of docs/gallery.png."""
    with Image.open(SHEET) as image:
        return image.info.get("Schemes", "").split(", ")


def write_row(cls: type[pe.Scheme]) -> None:
    """Writes a scheme's row into README.md; a new one comes last."""
    text = README.read_text()
    table = re.search(r"(?m)^\| name \| class \|.*\n(\|.*\n)+", text)[0]
    old = re.search(rf"(?m)^\| `{cls.name}` \|.*\n", table)
    new = row(cls, text)
    README.write_text(text.replace(table, table.replace(old[0], new) if old else table + new))


def main() -> None:
    """Writes all pages."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("names", nargs="+", choices=pe.SCHEMES, metavar="NAME")
    names = parser.parse_args().names
    for name in names:
        write_row(pe.SCHEMES[name])
    text = README.read_text()
    README.write_text(re.sub(r"\d+ schemes behind", f"{len(pe.SCHEMES)} schemes behind", text))
    names_with_kernels = [f"`{n}`" for n, cls in pe.SCHEMES.items() if has_kernels(cls)]
    lines = textwrap.fill(f"Schemes that run: {', '.join(names_with_kernels)}.", 100) + "\n"
    text = KERNELS.read_text()
    KERNELS.write_text(re.sub(LIST, lambda _: lines, text, count=1, flags=re.DOTALL))
    make_serving.main(["--only", ",".join(names)])
    experiments(["gallery", "--sheet", str(SHEET)])


if __name__ == "__main__":
    main()
