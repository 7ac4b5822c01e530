"""Links names in code to their pages: `pe.RoPE` and `RoPE(...)` in Markdown, any in a docstring.

Text in single backticks that is no name of a page stays plain code, without a warning. A type in a
signature that is not public leads to its source.
"""

import re
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.roles import XRefRole
from sphinx.transforms.post_transforms import SphinxPostTransform

import posenc_jax as pe

NAME = re.compile(r"(pe|posenc_jax|jax|nnx|flax)((?:\.\w+)+)(?:\(.*\))?")
CLASS = re.compile(r"([A-Z]\w*)(?:\(.*\))?")
LINKED = {
    name
    for name, thing in vars(pe).items()
    if isinstance(thing, type) and issubclass(thing, pe.Scheme | pe.FrequencyMap)
}
"""Schemes and frequency maps, which pages name without the package."""
ALIASES = {"pe": "posenc_jax", "nnx": "flax.nnx"}
WORDS = {"positions", "sharding", "testing", "key"}
"""Arguments that are names of modules or methods too."""


class CodeLink(XRefRole):
    """The role of text in single backticks in docstrings."""

    def process_link(self, env, refnode, has_explicit_title, title, target):
        """Makes a reference to any object of Python, which may be missing."""
        first, dot, names = target.partition(".")
        if target in pe.__all__:
            target = f"posenc_jax.{target}"
        elif dot and first in ALIASES:
            target = f"{ALIASES[first]}.{names}"
        refnode.attributes |= attributes("" if title in WORDS else target)
        refnode["py:module"] = env.ref_context.get("py:module")
        refnode["py:class"] = env.ref_context.get("py:class")
        return title, refnode["reftarget"]


def attributes(target: str) -> dict[str, Any]:
    """Returns the attributes of a reference to an object of Python, which may be missing."""
    return {"refdomain": "py", "reftype": "obj", "reftarget": target, "may_be_missing": True}


class LinkCode(SphinxPostTransform):
    """Makes references of code such as `pe.RoPE` in Markdown pages."""

    default_priority = 5  # Before references are resolved.

    def run(self, **kwargs) -> None:
        """Wraps each name in a reference."""
        for node in list(self.document.findall(nodes.literal)):
            target = self.target(node.astext())
            if target and not isinstance(node.parent, nodes.reference | addnodes.pending_xref):
                link = addnodes.pending_xref("", **attributes(target))
                link["refdoc"] = self.env.current_document.docname
                node.parent.replace(node, link)
                link += node

    @staticmethod
    def target(code: str) -> str:
        """Returns the full name of the object that code names, "" if it is none."""
        if match := NAME.fullmatch(code):
            return ALIASES.get(match[1], match[1]) + match[2]
        match = CLASS.fullmatch(code)
        return f"posenc_jax.{match[1]}" if match and match[1] in LINKED else ""


def without_page(app, env, node, content) -> nodes.Node | None:
    """Returns a link to the source of an internal type, or the code itself if it may be missing."""
    module, _, name = node["reftarget"].rpartition(".")
    if node["refdomain"] == "py" and module.startswith("posenc_jax."):
        address = app.config.linkcode_resolve("py", {"module": module, "fullname": name})
        if address:
            return nodes.reference("", "", content, internal=False, refuri=address)
    return content if node.get("may_be_missing") else None


def setup(app) -> dict:
    """Adds the role, the transform and the answer for names without a page."""
    app.add_role("code_link", CodeLink(innernodeclass=nodes.literal))
    app.add_post_transform(LinkCode)
    app.connect("missing-reference", without_page, priority=900)  # After intersphinx.
    return {"parallel_read_safe": True}
