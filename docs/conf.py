"""Sphinx: the pages of this folder, and the reference from the docstrings; `make docs`."""

import re
from pathlib import Path

from moe_ext import __version__

project = "moe_ext"
author = "the authors of moe_ext"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"moe_ext {__version__}"
myst_heading_anchors = 4
default_role = "code"
smartquotes_action = "D"  # dashes before descriptions; quotes stay as they are typed
# Docstrings name types themselves; signatures stay short enough to read.
autodoc_typehints = "none"
autodoc_member_order = "groupwise"
napoleon_google_docstring = True
napoleon_use_rtype = False
napoleon_use_ivar = True
# Plain words of a docstring that are also attributes of two classes are no links.
suppress_warnings = ["ref.python"]

HERE = Path(__file__).parent


def contents(*pages, caption=""):
    """A section of the sidebar."""
    options = f":caption: {caption}\n" * bool(caption) + ":hidden:\n:maxdepth: 1\n\n"
    return "\n```{toctree}\n" + options + "\n".join(pages) + "\n```\n"


def links(text):
    """The pages that a page links."""
    return re.findall(r"\]\((\w[\w/.-]*)\.md\)", text)


def fill(app, name, source):
    """Adds what only the site has: the README as its start, the sidebar, and whole docstrings."""
    text = source[0]
    if name == "index":
        text = (HERE.parent / "README.md").read_text().replace("](", "](../")
        text = text.replace("](../docs/", "](")
        for section in (HERE / "README.md").read_text().split("\n## ")[1:]:
            title, pages = section.split("\n", 1)[0], links(section)
            text += contents(*["README"] * (title == "Start"), *pages, caption=title)
    elif name == "api":
        text += contents(*links(text))
    elif name.startswith("api/"):
        module = name.removeprefix("api/")
        names = ", ".join(re.findall(r"^## (\w+)$", text, re.MULTILINE))
        members = f"   :members: {names}\n" if names else ""
        docstrings = f"```{{eval-rst}}\n.. automodule:: {module}\n{members}```"
        title = text.split("\n", 1)[0]
        also = "\n\n".join(re.findall(r"^`\w+` is on the page.*", text, re.MULTILINE))
        text = f"{title}\n\n{docstrings}\n\n{also}\n"
    text = text.replace("](../README.md", "](index.md")
    # Blocks without a language are output, not Python.
    blocks = re.compile(r"^( *)```([^\n]*)\n(.*?^\1```)$", re.MULTILINE | re.DOTALL)
    text = blocks.sub(lambda m: f"{m[1]}```{m[2] or 'text'}\n{m[3]}", text)
    # Other files of the repository are no pages of the site.
    source[0] = re.sub(r"\[([^\]]*)\]\(\.\./([^)#]*)[^)]*\)", r"\1 (`\2`)", text)


def setup(app):
    """Called by Sphinx."""
    app.connect("source-read", fill)
    # The start page is made of files that Sphinx does not look at.
    app.connect("env-get-outdated", lambda *_: ["index"])
