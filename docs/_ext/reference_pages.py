"""Writes docs/reference/, a page for each public name and module, before the sources are read.

The docstring of `posenc_jax` gives the families of names and their order. A public name without a
docstring, a family or a page fails the build.
"""

import enum
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from scheme_facts import facts, is_map, is_scheme, picture
from scheme_use import WHEN, use
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util import inspect as sphinx_inspect

import posenc_jax as pe

MODULES = ("nnx", "linen", "positions", "sharding", "testing", "contrib")
SCHEMES = (
    "embedding",
    "rotary",
    "bias",
    "content",
    "logits",
    "frequencies of RoPE",
    "combinations",
)
"""Families under "Schemes" in the table of contents; the others are below "Reference"."""
FORMULA = ("posenc_jax.schemes.", "posenc_jax.contrib.")
PICTURES = """8 heads of 64, and 128 tokens, with windows and chunks within them. Tokens have equal
content unless the caption says otherwise, so that keys differ by position only; parameters are the
initial ones. `python -m experiments gallery` draws more."""


def families() -> dict[str, list[str]]:
    """Returns the names of each family, from the docstring of the package.

    A family is an indented row: its name, two spaces or more, and text with the names.
    """
    names: dict[str, list[str]] = {}
    public = {*pe.__all__, *MODULES}
    taken: set[str] = set()
    for line in pe.__doc__.splitlines():
        row = re.fullmatch(r" {4}(?:(\S.*?) {2,}| +)(\S.*)", line)
        if not row:
            continue
        if row[1]:
            names[row[1]] = members = []
        new = [word for word in re.findall(r"\w+", row[2]) if word in public - taken]
        members += dict.fromkeys(new)
        taken |= set(new)
    if missing := public - taken:
        raise ExtensionError(f"the docstring of posenc_jax names no {', '.join(sorted(missing))}")
    return names


def first_sentence(thing: Any) -> str:
    """Returns the first sentence of a docstring as Markdown, for the cell of a table."""
    paragraph = " ".join(doc(thing).split("\n\n")[0].split())
    return markdown(re.split(r"(?<=[a-z0-9)`]\.)\s+(?=[A-Z`])", paragraph)[0]).replace("|", "\\|")


def doc(thing: Any) -> str:
    """Returns the docstring of a thing, which must have one of its own."""
    text = inspect.getdoc(thing) if not inspect.isclass(thing) else thing.__doc__
    if not text:
        raise ExtensionError(f"{getattr(thing, '__qualname__', thing)} has no docstring")
    return inspect.cleandoc(text)


def markdown(text: str) -> str:
    """Returns the text of a docstring as Markdown, with its addresses as links."""
    parts = re.split(r"(`[^`]*`|https://[^\s,;)]*[^\s,;).])", text)
    for i, part in enumerate(parts):
        if part.startswith("https://"):
            title = part.removeprefix("https://").replace("arxiv.org/abs/", "arXiv:")
            parts[i] = f"[{title}]({part})"
        elif not part.startswith("`"):
            parts[i] = re.sub(r"([*<>\[\]^])", r"\\\1", part)
    return "".join(parts)


def formula(module: ModuleType) -> list[str]:
    """Returns the docstring of a module as lines of Markdown; indented blocks are formulas."""
    lines: list[str] = []
    for block in re.split(r"\n\n(?=\S)", inspect.cleandoc(module.__doc__ or "")):
        text, *formulas = re.split(r"\n+(?= {4})", block, maxsplit=1)
        text = re.sub(r"\n(?=(Papers?|Reference code|Code)\b[^:\n]*:)", "\n\n", text)
        lines += [markdown(text), ""]
        if formulas:
            lines += ["```text", inspect.cleandoc("\n" + formulas[0]), "```", ""]
    return lines


def documented(thing: type) -> tuple[list[str], list[str]]:
    """Returns the members of a class with a docstring, and the documented hooks it overrides."""
    documented_here, overridden = {}, {}
    for cls in thing.__mro__:
        if cls is not thing and (cls.__name__ in pe.__all__ or not is_ours(cls)):
            break
        for name, member in vars(cls).items():
            call = name == "__call__" and not issubclass(thing, enum.Enum)
            if name.startswith("_") and not call:
                continue
            member = getattr(member, "__func__", member)
            if not (inspect.isroutine(member) or isinstance(member, property)):
                continue
            bases = (b for b in thing.__mro__ if b in BASES and b is not thing and name in vars(b))
            base = next((b for b in bases if vars(b)[name].__doc__), None)
            if member.__doc__:
                documented_here[name] = None
            elif base:
                overridden[name] = f"{{py:obj}}`{name} <posenc_jax.{base.__name__}.{name}>`"
    return list(documented_here), list(overridden.values())


BASES = (pe.Scheme, pe.Rotary, pe.Rule, pe.Implementation, pe.FrequencyMap)


def is_ours(thing: Any) -> bool:
    """Returns whether a class or function is defined in the package."""
    return getattr(thing, "__module__", "").startswith("posenc_jax")


def directive(module: str, name: str, thing: Any) -> list[str]:
    """Returns the lines that document a thing by autodoc."""
    lines = [f".. autofunction:: {module}.{name}"]
    if inspect.isclass(thing):
        lines = [f".. autoclass:: {module}.{name}"]
        if issubclass(thing, enum.Enum):
            lines += ["   :members:", "   :undoc-members:"]
        else:
            members, _ = documented(thing)
            special = [m for m in members if m.startswith("__")]
            members = [m for m in members if not m.startswith("__")]
            lines += [f"   :members: {', '.join(members)}"] if members else []
            lines += [f"   :special-members: {', '.join(special)}"] if special else []
    elif not inspect.isroutine(thing):
        lines = [
            f".. py:data:: {name}",
            f"   :module: {module}",
            "",
            f"   {data_doc(module, name)}",
        ]
    return ["```{eval-rst}", *lines, "```", ""]


def data_doc(module: str, name: str) -> str:
    """Returns the docstring below the assignment of a public name that is no class or function."""
    for other in sorted(m for m in sys.modules if m.startswith(module)):
        if text := ModuleAnalyzer.for_module(other).find_attr_docs().get(("", name)):
            return " ".join(text)
    raise ExtensionError(f"{module}.{name} has no docstring")


def page(name: str, thing: Any) -> list[str]:
    """Returns the page of a public name."""
    module = inspect.getmodule(thing)
    home = "posenc_jax" if name in pe.__all__ else "posenc_jax.contrib"
    is_encoding = inspect.isclass(thing) and (is_scheme(thing) or is_map(thing))
    head = use(thing) if is_encoding else []
    lines = [f"# {name}", "", *head, *directive(home, name, thing)]
    if name == "SCHEMES":
        rows = [
            f"| `{key}` | [{cls.__name__}]({cls.__name__}.md) |" for key, cls in pe.SCHEMES.items()
        ]
        return [*lines, "| name | class |", "|---|---|", *rows, ""]
    if is_encoding:
        lines += ["## Formula and sources", "", *formula(module)]
        lines += ["## Pictures", "", PICTURES if is_scheme(thing) else "", "", *picture(thing)]
        lines += ["## Facts", "", "| | |", "|---|---|"]
        _, overridden = documented(thing)
        rows = facts(thing) + [("Overrides", ", ".join(overridden))] * bool(overridden)
        lines += [f"| {label} | {text} |" for label, text in rows] + [""]
    elif module is not None and module.__name__.startswith(FORMULA):
        others = [n for n in pe.__all__ if inspect.getmodule(getattr(pe, n)) is module]
        others = [n for n in others if is_scheme(getattr(pe, n)) or is_map(getattr(pe, n))]
        if others:
            links = ", ".join(f"[{n}]({n}.md)" for n in others)
            lines += [f"The formula and its sources are on the page of {links}.", ""]
        elif "\n\n" in str(module.__doc__):
            lines += ["## About", "", *formula(module)]
    return lines


def module_page(name: str) -> list[str]:
    """Returns the page of a public module, with all of its names."""
    module = importlib.import_module(f"posenc_jax.{name}")
    lines = [f"# posenc_jax.{name}", "", *formula(module)]
    lines += ["```{eval-rst}", f".. py:module:: posenc_jax.{name}", "```", ""]
    if module is pe.contrib:  # Its schemes have pages like the others.
        return [*lines, *table(module.__all__), *toctree(module.__all__)]
    for member in module.__all__:
        thing = getattr(module, member)
        if inspect.isroutine(thing) or inspect.isclass(thing):
            doc(thing)
        lines += directive(module.__name__, member, thing)
    return lines


def table(names: list[str]) -> list[str]:
    """Returns a table of names with the first sentence of each docstring, and when to take them."""
    uses = [WHEN.get(name, "") for name in names]
    extra = (" take it |", "---|") if any(uses) else ("", "")
    lines = [f"| name | what it is |{extra[0]}", f"|---|---|{extra[1]}"]
    for name, use_of in zip(names, uses, strict=True):
        thing = importlib.import_module(f"posenc_jax.{name}") if name in MODULES else public(name)
        sentence = "Scheme classes by name." if name == "SCHEMES" else first_sentence(thing)
        last = f" {use_of} |" if any(uses) else ""
        lines.append(f"| [{label(name)}]({file(name)}.md) | {sentence} |{last}")
    return [*lines, ""]


def public(name: str) -> Any:
    """Returns a thing of `posenc_jax` or of `posenc_jax.contrib`."""
    return getattr(pe if name in pe.__all__ else pe.contrib, name)


def label(name: str) -> str:
    """Returns the title of a page."""
    return f"posenc_jax.{name}" if name in MODULES else name


def file(name: str) -> str:
    """Returns the name of a page; modules have another than functions and families."""
    return f"module_{name}" if name in MODULES else name


def toctree(pages: list[str]) -> list[str]:
    """Returns a hidden table of contents."""
    return ["```{toctree}", ":hidden:", "", *pages, "```", ""]


def write(app) -> None:
    """Writes all pages."""
    folder = Path(app.srcdir) / "reference"
    folder.mkdir(exist_ok=True)
    pages: dict[str, list[str]] = {}
    index = ["# All names", "", "The names of `posenc_jax` by family, and its modules.", ""]
    shown = ["gallery"]
    for family, names in families().items():
        title, slug = family[0].upper() + family[1:], "family_" + re.sub(r"\W", "_", family)
        pages[slug] = [f"# {title}", "", *table(names), *toctree([file(n) for n in names])]
        index += [f"## {title}", "", *table(names)]
        shown.append(slug)
        for name in names:
            thing = getattr(pe, name)
            pages[file(name)] = module_page(name) if name in MODULES else page(name, thing)
    pages |= {name: page(name, public(name)) for name in pe.contrib.__all__}
    pages["index"] = index + toctree(shown)
    pages["gallery"] = gallery()
    for old in folder.iterdir():
        if old.stem not in pages:
            old.unlink()
    for name, lines in pages.items():
        target, text = folder / f"{name}.md", "\n".join(lines)
        if not target.exists() or target.read_text() != text:  # Others need no new build.
            target.write_text(text)


def gallery() -> list[str]:
    """Returns the page with a picture of each scheme."""
    lines = ["# Gallery", "", "Every scheme and frequency map; each picture leads to its page.", ""]
    lines += ["::::{grid} 1 2 3 4", ":gutter: 2", ":class-container: gallery", ""]
    names = [name for names in families().values() for name in names if name not in MODULES]
    for thing in map(public, [*names, *pe.contrib.__all__]):
        if is_scheme(thing) or is_map(thing):
            first = picture(thing)[0].split()[1]
            lines += [f":::{{grid-item-card}} {thing.__name__}", f":img-bottom: {first}"]
            lines += [":class-img-bottom: dark-light"]
            lines += [f":link: {thing.__name__}", ":link-type: doc", ":::", ""]
    return [*lines, "::::", ""]


def check(app, env) -> None:
    """Raises unless every public name has a page."""
    objects = env.domains.python_domain.objects
    names = [n for n in pe.__all__ if n not in MODULES]
    for module in MODULES:
        names += [f"{module}.{n}" for n in importlib.import_module(f"posenc_jax.{module}").__all__]
    if missing := [name for name in names if f"posenc_jax.{name}" not in objects]:
        raise ExtensionError(f"public names without a page: {', '.join(missing)}")


def of_flax(app, what, name, thing, options, signature, returned):
    """Returns the signature of a Flax module as its author wrote it, for a class of one."""
    if what != "class" or not signature:
        return None
    if ", parent: " in signature:  # Linen adds this argument and a name.
        signature = signature[: signature.index(", parent: ")] + ")"
    if "**kwargs" in signature:  # The metaclass of NNX hides the arguments.
        arguments = sphinx_inspect.signature(thing.__init__, bound_method=True)
        arguments = arguments.replace(return_annotation=inspect.Signature.empty)
        signature = sphinx_inspect.stringify_signature(arguments, unqualified_typehints=True)
    signature = re.sub(r"= <function [^,)]*>", "= ...", signature)  # Initializers.
    return re.sub(r"= <class '([^']*)'>", r"= \1", signature), returned


def without_overloads() -> None:
    """Makes autodoc show the signature of an overloaded function, which names all arguments."""
    analyze = ModuleAnalyzer.analyze

    def analyze_once(self) -> None:
        analyze(self)
        self.overloads = {}

    ModuleAnalyzer.analyze = analyze_once


def setup(app) -> dict:
    """Connects the events of Sphinx."""
    without_overloads()
    app.connect("autodoc-process-signature", of_flax)
    app.connect("builder-inited", write)
    app.connect("env-updated", check)
    return {"parallel_read_safe": True}
