"""Settings of Sphinx: `make docs` builds the site offline, with warnings as errors."""

import inspect
import os
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs" / "_ext")]
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import inventories  # noqa: E402

import posenc_jax  # noqa: E402
from experiments.gallery import explorer  # noqa: E402

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

project = "posenc_jax"
author = PROJECT["authors"][0]["name"]
project_copyright = author
version = release = posenc_jax.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.intersphinx",
    "sphinx.ext.linkcode",
    "sphinx_copybutton",
    "sphinx_design",
    "code_links",
    "reference_pages",
    "repository_links",
]
exclude_patterns = ["_ext", "_static"]
nitpicky = True
smartquotes_action = "D"  # Dashes; quotes of strings stay as they are.
default_role = "code_link"

repository = PROJECT["urls"]["Repository"]
included = {
    "README.md": "index",
    "CHANGELOG.md": "changelog",
    "CONTRIBUTING.md": "contributing",
}
"""Files of the repository that a page of the site includes, and the page."""

myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
myst_url_schemes = {"http": None, "https": None, "mailto": None, "site": "{{path}}"}

autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
napoleon_numpy_docstring = False
# Lists, in which one line may describe several arguments or attributes.
napoleon_use_param = False
napoleon_custom_sections = [("Attributes", "params_style")]
add_module_names = False
maximum_signature_line_length = 80
toc_object_entries_show_parents = "hide"

intersphinx_mapping = inventories.write(ROOT / "build" / "inventories")

html_theme = "sphinx_book_theme"
html_title = "posenc_jax"
html_static_path = ["_static"]
html_extra_path = ["explorer.html"]
Path(__file__).with_name("explorer.html").write_text(explorer.render())
html_css_files = ["site.css"]
html_js_files = ["sort.js", "search.js"]
html_favicon = "_static/favicon.svg"
html_copy_source = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "navbar_persistent": [],
    "repository_url": repository,
    "use_repository_button": True,
    "use_issues_button": True,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "show_toc_level": 2,
}


def linkcode_resolve(domain: str, info: dict[str, str]) -> str | None:
    """Returns the address of the lines that define an object."""
    thing = sys.modules.get(info["module"])
    for part in info["fullname"].split("."):
        thing = getattr(thing, part, None)
    try:
        thing = inspect.unwrap(getattr(thing, "fget", thing))
        file = Path(inspect.getsourcefile(thing)).relative_to(ROOT)
        lines, start = inspect.getsourcelines(thing)
    except (TypeError, OSError, ValueError):
        return None
    return f"{repository}/blob/main/{file}#L{start}-L{start + len(lines) - 1}"


SEARCHED = {
    "masks": ["sliding window", "BlockMask", "block diffusion", "prefix LM", "attention sinks"],
    "cluster": ["slurm", "kubernetes", "ray"],
    "flax": ["orbax", "checkpoint of a layer", "padding"],
    "which_gpu": ["A100", "H100", "H200", "TPU"],
    "recipes/flex_attention": ["FlexAttention", "score_mod"],
    "coming_from/diffusers": ["flux", "wan", "diffusers"],
}
"""Words that people search for, by the page that comes first."""


def setup(app) -> None:
    """Adds a menu of the recipes and entries of the index, which GitHub would show as code."""

    def add(app, docname: str, source: list[str]) -> None:
        if docname == "recipes/README":
            source[0] += "\n```{toctree}\n:hidden:\n:glob:\n\n*\n```\n"
        if terms := SEARCHED.get(docname):  # A search shows entries last, unless they are main.
            entries = ", ".join(f"! {term}" for term in terms)
            source[0] = f"```{{index}} {entries}\n```\n\n{source[0]}"

    app.connect("source-read", add)
