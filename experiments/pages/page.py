"""Pages: paragraphs of Markdown, which are also shown as HTML with their pictures inside."""

import csv
import io
import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import jinja2
from markdown_it import MarkdownIt
from markupsafe import escape

from experiments.errors import ConfigError
from experiments.pages.plots import standalone

_SHELL = Path(__file__).with_name("page.html.jinja")


def fill(template: Path, **values: object) -> str:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(template.parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    text = environment.get_template(template.name).render(values)
    return re.sub(r"\n{3,}", "\n\n", text.strip()) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """Returns a table as Markdown, with `words` columns of words before columns of numbers.

    >>> print(table(["scheme", "32"], [["rope", "0.9"]]))
    | scheme | 32 |
    |---|---:|
    | rope | 0.9 |
    """
    rule = f"|{'---|' * words}{'---:|' * (len(heads) - words)}"
    lines = (f"| {' | '.join(cells).lstrip()} |" for cells in [heads, *rows])
    return "\n".join([next(lines), rule, *lines])


def picture(file: str, caption: str = "") -> str:
    """Returns a picture as Markdown, nothing without a file."""
    return f"![{caption}]({file})" if file else ""


def pair(*parts: str) -> str:
    """Returns parts in columns, as HTML around Markdown; empty ones are left out."""
    columns = "\n".join(f"<div>\n\n{part}\n\n</div>" for part in parts if part)
    return f'<div class="pair">\n{columns}\n</div>'


def details(title: str, lines: Sequence[str]) -> str:
    """Returns lines as they are under a title that opens them, nothing without lines."""
    text = "\n".join(map(escape, lines))
    return f"<details><summary>{title}</summary><pre>\n{text}\n</pre></details>" if lines else ""


WRITTEN = r"^(From|Made by) `python -m experiments "
"""The beginning of a line that all pages have."""


def target_of(page: Path | None, name: str) -> Path:
    """Returns the page to write: the option --page, or docs/NAME.md."""
    target = page or Path("docs") / f"{name}.md"
    if target.suffix != ".md":
        raise ConfigError(f"--page: must be the name of a Markdown file, got {target}")
    if target.is_dir():
        raise ConfigError(f"--page: {target} is a folder; name a file")
    if target.exists() and not re.search(WRITTEN, target.read_text(errors="replace"), re.MULTILINE):
        raise ConfigError(f"--page: {target} was not written by a command; name another file")
    return target


def command_of(name: str, file: Path, folder: Path, target: Path, also: Sequence[str] = ()) -> str:
    """Returns the command that writes a page: its file, and the options that are no defaults.

    >>> command_of("study", Path("configs/a.toml"), Path("results/a"), Path("b.md"), ["t5", "shaw"])
    'python -m experiments study configs/a.toml --also t5,shaw --page b.md'
    """
    words = ["python", "-m", "experiments", name, str(file)]
    words += ["--also", ",".join(also)] if also else []
    words += ["--results", str(folder)] if folder != Path("results") / file.stem else []
    words += ["--page", str(target)] if target != Path("docs") / f"{file.stem}.md" else []
    return shlex.join(words)


def files_of(
    target: Path, folder: Path, text: str, numbers: str, pictures: Mapping[str, str]
) -> dict[Path, str]:
    """Returns the contents of the files of a page by path.

    `folder` is of results, and has the page as HTML with its pictures inside, `report.html`.
    """
    return {
        target: text,
        target.with_suffix(".csv"): numbers,
        folder / "report.html": as_html(text, pictures, os.path.relpath(target.parent, folder)),
        **{target.with_name(name): standalone(svg) for name, svg in pictures.items()},
    }


def as_csv(lines: Sequence[Mapping[str, str]]) -> str:
    """Returns rows as CSV, with the columns of all in order of first appearance."""
    columns = list(dict.fromkeys(name for line in lines for name in line))
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return buffer.getvalue()


def plain(text: object) -> str:
    r"""Returns Markdown that shows a text as it is, in a line.

    >>> plain("<b> a|b\nc_d"), plain("KERPLE (f32[2])")
    ('\\<b\\> a\\|b c\\_d', 'KERPLE (f32\\[2\\])')
    """
    return re.sub(r"([\\`*_{}\[\]<>#|~&$])", r"\\\1", " ".join(str(text).split()))


def as_html(text: str, pictures: Mapping[str, str], folder: str = ".") -> str:
    """Returns a page of Markdown as HTML that loads nothing.

    `pictures` has <svg> elements by the files that the page names; other pictures are left out.
    Relative links start at `folder`, as seen from the HTML file.
    """
    parser = MarkdownIt("commonmark").enable("table")

    def picture(self, tokens, i, options, env):
        svg, caption = pictures.get(str(tokens[i].attrs["src"]), ""), escape(tokens[i].content)
        return f'<span class="picture">{svg}<span>{caption}</span></span>'

    def link(self, tokens, i, options, env):
        target = str(tokens[i].attrs["href"])
        if not re.match(r"\w+:|[#/]", target):
            tokens[i].attrs["href"] = f"{folder}/{target}"
        return self.renderToken(tokens, i, options, env)

    parser.add_render_rule("image", picture)
    parser.add_render_rule("link_open", link)
    title = text.partition("\n")[0].removeprefix("# ")
    return fill(_SHELL, title=escape(title), body=parser.render(text))
