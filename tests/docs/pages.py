"""Python blocks of Markdown pages, with their output or error.

Blocks of a page run in order, in one namespace. A comment `<!-- not run: why -->` before a block
says why it does not run, and `<!-- not run without NAME -->` that it runs where that package is
installed; a version after the name is the oldest. Its output is in comments after its calls of
`print`, or in a `text` block after it; a `text` block that begins with the name of an exception is
the error that the block raises. Cells of the second column of a table whose head is
`| I have | I write |` are blocks of one line.
"""

import contextlib
import dataclasses
import importlib.metadata
import importlib.util
import io
import pathlib
import re
import textwrap
import traceback

from packaging.version import Version

ROOT = pathlib.Path(__file__).parents[2]
BLOCK = re.compile(
    r"(?:^ *<!-- not run(?P<why>:| without) (?P<reason>[^>]+?) -->\n+)?"
    r"^(?P<indent> *)```python\n(?P<code>.*?)^ *```\n"
    r"(?:\n+ *```text\n(?P<text>.*?)^ *```$)?"
    r"|^\| (?!I have|-)[^|\n]* \| (?P<cell>`[^\n]*`) \|$",
    re.DOTALL | re.MULTILINE,
)


@dataclasses.dataclass(frozen=True)
class Block:
    """A block of a page, whose code begins at `line`, from 1."""

    page: str
    line: int
    code: str
    text: str | None
    runs: bool = True

    def run(self, names: dict) -> None:
        """Runs the code among `names`, and compares its output or error with the page."""
        code = compile("\n" * (self.line - 1) + self.code, str(ROOT / self.page), "exec")
        expected = self.text
        if expected is None:
            expected = "\n".join(re.findall(r"(?m)^ *print\(.*\)  # (.*)$", self.code))
        raises = re.match(r"[\w.]*(Error|Exception): ", expected)
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            try:
                exec(code, names)
            except Exception as error:
                if not raises:
                    raise
                out.write(traceback.format_exception_only(error)[0])
        printed, expected = (" ".join(text.split()) for text in (out.getvalue(), expected))
        assert printed == expected, f"{self.page}:{self.line} printed\n{printed}\nnot\n{expected}"


def missing(package: str) -> bool:
    """Whether "name" is not installed, or "name version" not in this version or a later one."""
    name, _, oldest = package.partition(" ")
    return not importlib.util.find_spec(name) or (
        bool(oldest) and Version(importlib.metadata.version(name)) < Version(oldest)
    )


def all_pages() -> list[str]:
    """Returns the paths of the Markdown pages for users and contributors, without built ones."""
    paths = (path.relative_to(ROOT) for path in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    return sorted(str(path) for path in paths if path.parts[:2] != ("docs", "reference"))


def read(page: str) -> str:
    """Returns the text of a page."""
    return (ROOT / page).read_text()


def blocks(page: str) -> list[Block]:
    """Returns the Python blocks of a page, in order."""
    text, parts = read(page), []
    in_tables = "| I have | I write |" in text
    for match in BLOCK.finditer(text):
        start = match.start("code")
        if match["cell"] is not None:
            if not in_tables:
                continue
            start, code, output = match.start("cell"), match["cell"].strip("`"), None
            code = code.replace(r"\|", "|")
        else:
            code, output = textwrap.dedent(match["code"]), match["text"]
        runs = not (missing(match["reason"]) if match["why"] == " without" else match["why"])
        parts.append(Block(page, text.count("\n", 0, start) + 1, code, output, runs))
    return parts


def code(page: str) -> list[str]:
    """Returns the code of the blocks of a page that run."""
    return [block.code for block in blocks(page) if block.runs]
