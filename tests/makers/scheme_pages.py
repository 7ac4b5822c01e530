"""Writes the parts of the documentation that follow from the code of a scheme.

    python -m tests.makers scheme_pages NAME [NAME ...]

For each scheme: the row of docs/decoding.csv, which takes 15 s. For all of them: the tables of
docs/schemes.md, from traits and docstrings, docs/gallery.png and docs/gallery/, in five minutes.
`--tables` writes docs/schemes.md alone.
`tests/test_layout.py` calls `missing` for each scheme.
"""

import dataclasses
import functools
import importlib
import pathlib
import re
import sys
import types

import jax
from PIL import Image

import posenc_jax as pe
from experiments.__main__ import main as experiments
from experiments.gallery import page
from tests.makers import serving
from tests.support import build

ROOT = pathlib.Path(__file__).parents[2]
PACKAGE = ROOT / "posenc_jax"
PAGE, SHEET, USE = (
    ROOT / "docs" / name for name in ("schemes.md", "gallery.png", "_ext/scheme_use.py")
)
# The headings of docs/schemes.md.
FAMILIES = {
    name: page.FAMILIES[name]
    for name in ("additive", "rotary", "bias", "content", "logit_scale", "contrib")
}


def scheme_classes() -> list[type[pe.Scheme]]:
    """Returns the scheme classes of all files of the families, exported or not."""
    classes = []
    folders = [PACKAGE / "contrib", *(PACKAGE / "schemes" / family for family in FAMILIES)]
    for path in sorted(path for folder in folders for path in folder.rglob("*.py")):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for cls in vars(importlib.import_module(name)).values():
            if isinstance(cls, type) and issubclass(cls, pe.Scheme):
                classes += [cls] if cls.name and cls.__module__ == name else []
    return classes


def facts(cls: type[pe.Scheme]) -> list[str]:
    """Returns three cells of a scheme's row: acts on, learned, relative."""
    scheme = build(cls)
    learned = jax.tree.leaves(jax.eval_shape(scheme.init, jax.random.key(0)))
    return [str(scheme.acts), *("yes" if x else "no" for x in (learned, scheme.traits.relative))]


def summary(thing: object) -> str:
    """Returns the first paragraph of a docstring, on one line."""
    return " ".join((thing.__doc__ or "").strip().split("\n\n")[0].split())


def sources(thing: type) -> str:
    """Returns who is cited in a class's first sentence, and the links of its module's papers."""
    cited = ", ".join(re.findall(r"\(([^()]*)\)", summary(thing)))
    doc = sys.modules[thing.__module__].__doc__ or ""
    papers, code = (
        re.search(rf"(?s)\n{what}s?: (.*)", doc) for what in ("Paper", "Reference code")
    )
    urls = re.findall(r"https://[\w./-]+\w", papers[1].split("\nReference")[0] if papers else "")
    if code and (not papers or papers[1].startswith("none")):
        urls = [f"https://github.com/{code[1].split(',')[0]}"]
    links = [f"[{re.sub('https://(arxiv.org/abs/)?', '', url)}]({url})" for url in urls]
    return ": ".join(part for part in (cited, ", ".join(links)) if part)


def link(thing: type | types.FunctionType) -> str:
    """Returns the name of a class or function, with a link to its file."""
    path = "/".join(thing.__module__.split("."))
    return f"[`{thing.__name__}`](../{path}.py)"


def row(cls: type[pe.Scheme]) -> str:
    """Returns a scheme's row in docs/schemes.md."""
    about = summary(sys.modules[cls.__module__])
    return table_row(link(cls), f"`{cls.name}`", about, *facts(cls), sources(cls))


def table_row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |\n"


def tables() -> dict[str, str]:
    """Returns the tables of docs/schemes.md by the headings above them."""
    public = [thing for thing in vars(pe).values() if hasattr(thing, "__module__")]
    classes = [thing for thing in public if isinstance(thing, type)]
    functions = [thing for thing in public if isinstance(thing, types.FunctionType)]
    head = "| class | name | what it does | acts on | learned | relative | source |\n"
    head += "|---|---|---|---|---|---|---|\n"
    texts = {
        heading: head
        + "".join(row(c) for c in pe.SCHEMES.values() if f".{family}." in c.__module__)
        for family, heading in FAMILIES.items()
    }
    maps = [c for c in classes if issubclass(c, pe.FrequencyMap) and c is not pe.FrequencyMap]
    texts["Frequency maps of RoPE"] = "| map | what it does | source |\n|---|---|---|\n" + "".join(
        table_row(link(c), re.sub(r" \([^()]*\d{4}[^()]*\)", "", summary(c)), sources(c))
        for c in maps
    )
    positions = [*vars(pe.positions).values(), *vars(pe.contrib).values()]
    combinators = [f for f in functions if ".combinators." in f.__module__]
    listed_functions = {
        "Combinators": [*combinators, pe.layer_pattern],
        "Positions and coordinates": [f for f in positions if isinstance(f, types.FunctionType)],
    }
    for heading, things in listed_functions.items():
        texts[heading] = "| function | what it does |\n|---|---|\n" + "".join(
            table_row(link(f), summary(f)) for f in things
        )
    return texts


def with_tables(text: str) -> str:
    """Returns the text of docs/schemes.md with new tables."""
    for heading, table in tables().items():
        place = rf"(?m)(^## {heading}\n(?:(?!\|).*\n)*)(?:\|.*\n)+"
        text, count = re.subn(place, lambda m, table=table: m[1] + table, text, count=1)
        assert count, f"docs/schemes.md has no table below {heading!r}"
    return text


def missing(cls: type[pe.Scheme]) -> list[str]:
    """Returns a line for each part that a scheme lacks in package, tests and documentation."""
    *folders, file = cls.__module__.split(".")[1:]
    folder, name = "/".join(folders), cls.__name__
    home = pe.contrib if folder == "contrib" else pe
    init = f"{home.__name__.replace('.', '/')}/__init__.py"
    test = ROOT / f"tests/{folder}/test_{file}.py"
    text = test.read_text() if test.exists() else ""
    settings = [f.name for f in dataclasses.fields(cls) if f.default is not dataclasses.MISSING]
    values = ", ".join(f'"{setting}": ...' for setting in settings)
    key = f"{'contrib' if home is pe.contrib else 'pe'}.{name}: {{"
    options = f"OPTIONS = {{{key}{values}}}}}, another value of each setting"
    checks = [
        (
            "https://arxiv.org/abs/" in str(sys.modules[cls.__module__].__doc__),
            f"posenc_jax/{folder}/{file}.py: a link to arxiv.org/abs",
        ),
        (hasattr(home, name), f"{init}: from {cls.__module__} import {name} as {name}"),
        (re.search(rf"\b{name}\b", str(home.__doc__)), f"{init}: {name} in the docstring"),
        (text, f"{test.relative_to(ROOT)}: a test with numbers from outside"),
        (not settings or key in text, f"{test.relative_to(ROOT)}: {options}"),
        (f'"{name}": ' in USE.read_text(), f"{USE.relative_to(ROOT)}: when to take it, in WHEN"),
    ]
    lines = [line for present, line in checks if not present]
    pages = {
        "its row in docs/schemes.md": row(cls) in PAGE.read_text(),
        "its row in docs/decoding.csv": cls.name in serving.table(),
        "its picture in docs/gallery.png": cls.name in pictured(),
    }
    if absent := [page for page, present in pages.items() if not present]:
        command = f"python -m tests.makers scheme_pages {cls.name}"
        lines.append(f"{command} writes {', '.join(absent)}")
    return lines


@functools.cache
def pictured() -> list[str]:
    """Returns the names in the text of docs/gallery.png."""
    with Image.open(SHEET) as image:
        return image.info.get("Schemes", "").split(", ")


def main(argv: list[str]) -> None:
    """Writes all pages."""
    if not argv or {*argv} - pe.SCHEMES.keys() - {"--tables"}:
        raise SystemExit(f"name a scheme of {', '.join(pe.SCHEMES)}, or give --tables")
    PAGE.write_text(with_tables(PAGE.read_text()))
    if "--tables" not in argv:
        serving.main(argv)
        experiments(["gallery", "--out", str(SHEET.parent)])
