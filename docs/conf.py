"""Sphinx configuration: MyST pages, autodoc of the public names, warnings are errors (see noxfile.py)."""

import re
from pathlib import Path

_VERSION = Path(__file__).parents[1] / "trio_accel" / "_version.py"

project = "trio_accel"
author = "The trio_accel authors"
copyright = author  # noqa: A001 - the name that Sphinx reads
release = re.findall(r'^__version__ = "(.+)"$', _VERSION.read_text(encoding="utf-8"), re.MULTILINE)[0]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.doctest",
    "sphinx.ext.napoleon",
]
exclude_patterns = ["_build"]
suppress_warnings = ["toc.not_included"]  # pages of single decisions: their index links them
default_role = "py:obj"  # `name` in a docstring is a link where the name is ours, and code where it is not
nitpicky = False  # references to other projects' names are plain code: no inventory is fetched at build time

html_theme = "furo"
html_title = f"trio_accel {release}"

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "groupwise"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_typehints_format = "short"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False

# The programs in these pages run as doctests here; the `>>>` examples of the docstrings run under pytest,
# which sees private modules too.
doctest_test_doctest_blocks = ""
trim_doctest_flags = True
