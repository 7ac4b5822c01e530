"""Makes links of Markdown pages right on the site, as they are on GitHub.

A link to a file of the repository that is a page of the site leads to that page, and a link to any
other file outside of docs/ to the repository. A file of `html_extra_path` is a page without Sphinx:
its links get the scheme "site". Included files (`included` in conf.py) are read from
the root of the repository; their links to docs/ are left to the option `:relative-docs:`.
"""

import os
import re
from pathlib import Path

LINK = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")


def on_page(app, docname: str, source: list[str]) -> None:
    """Rewrites the links of a page of docs/."""
    source[0] = rewrite(app, source[0], (Path(app.srcdir) / docname).parent)


def on_include(app, relative_path: Path, parent_docname: str, content: list[str]) -> None:
    """Rewrites the links of a file that a page includes."""
    content[0] = rewrite(app, content[0], Path(app.srcdir).parent)


def rewrite(app, text: str, folder: Path) -> str:
    """Returns Markdown whose links lead to pages, or to the repository.

    Args:
      app: Sphinx.
      text: the Markdown.
      folder: of the file, where its links start.
    """
    docs = Path(app.srcdir)
    root = docs.parent
    pages = {root / file: docs / f"{page}.md" for file, page in app.config.included.items()}

    def replace(match: re.Match) -> str:
        anchor = match[2] or ""
        target = Path(os.path.normpath(folder / match[1]))
        target = pages.get(target, target)
        if (target / "README.md").exists() and target.is_relative_to(docs):
            target /= "README.md"
        if not target.exists():
            return match[0]  # Sphinx reports it.
        if target.is_relative_to(docs) and target.name in app.config.html_extra_path:
            return f"](site:{os.path.relpath(target, docs if folder == root else folder)})"
        if target.is_relative_to(docs) and target.is_file():
            return f"]({os.path.relpath(target, folder)}{anchor})"
        kind = "tree" if target.is_dir() else "blob"
        return f"]({app.config.repository}/{kind}/main/{target.relative_to(root)}{anchor})"

    return LINK.sub(replace, text)


def setup(app) -> dict:
    """Connects the events of Sphinx and of MyST."""
    app.add_config_value("repository", "", "env")
    app.add_config_value("included", {}, "env")
    app.connect("source-read", on_page)
    app.connect("include-read", on_include)
    return {"parallel_read_safe": True}
