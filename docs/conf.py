"""Sphinx: the pages of this folder, and the reference from the docstrings; `make docs`."""

from moe_ext import __version__

project = "moe_ext"
author = "the authors of moe_ext"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"moe_ext {__version__}"
myst_heading_anchors = 4
# Docstrings name types themselves; signatures stay short enough to read.
autodoc_typehints = "none"
autodoc_member_order = "groupwise"
napoleon_google_docstring = True
napoleon_use_rtype = False
napoleon_use_ivar = True
# Links out of this folder are those of the repository: tests/test_docs.py follows all. Plain words
# of a docstring that are also attributes of two classes are no links.
suppress_warnings = ["myst.xref_missing", "ref.python"]
