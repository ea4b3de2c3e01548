"""Sphinx configuration: the Markdown pages as they are, warnings are errors (see noxfile.py)."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import make_reference
import reference_domain
from docutils import nodes  # type: ignore[import-untyped]
from sphinx.addnodes import pending_xref
from sphinx.domains.python import ObjectEntry
from sphinx.errors import ExtensionError

if TYPE_CHECKING:
    from sphinx.application import Sphinx
    from sphinx.environment import BuildEnvironment

_GUIDE = "guide/index"
_VERSION = Path(__file__).parents[1] / "trio_accel" / "_version.py"

project = "trio_accel"
author = "The trio_accel authors"
copyright = author  # noqa: A001 - the name that Sphinx reads
release = re.findall(r'^__version__ = "(.+)"$', _VERSION.read_text(encoding="utf-8"), re.MULTILINE)[0]

extensions = ["myst_parser"]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"trio_accel {release}"
html_static_path = ["_static"]
html_css_files = ["wide.css"]
templates_path = ["_templates"]
# What `versions.py` hands over: the names of all versions, and of this one.
html_context = json.loads(os.environ.get("POLYVERSION_DATA", "{}"))
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "versions.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
        "sidebar/variant-selector.html",
    ]
}
if html_context.get("current_version") == "main" and len(html_context["versions"]) > 1:
    html_theme_options = {
        "announcement": "These pages describe the development version, which is not released."
    }

myst_heading_anchors = 4  # the same anchors as on a repository page

# Signatures are short where `reference_domain` says so, and have a line for each argument elsewhere.
python_maximum_signature_line_length = 1
python_use_unqualified_type_names = True
add_module_names = False
toc_object_entries = False  # headings have them already


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", _fill_reference)
    app.connect("source-read", _add_table_of_contents)
    app.connect("source-read", _offer_others_as_files)
    app.connect("doctree-read", _leave_names_of_others)
    app.connect("env-updated", _add_names_of_programs)


def _fill_reference(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the entries of the docstrings in place of the names that a page of the reference lists."""
    path = Path(app.srcdir) / f"{docname}.md"
    if path.parent == make_reference.PAGES:
        source[0] = make_reference.generated(reference_domain.DomainWriter)[path]


def _leave_names_of_others(app: Sphinx, doctree: nodes.document) -> None:
    """Types with entries have whole names. Sphinx would link others, such as ``T``, to any attribute."""
    for reference in list(doctree.findall(pending_xref)):
        if reference.get("refdomain") == "py" and "." not in reference["reftarget"]:
            reference.replace_self(nodes.Text(reference["reftarget"]))


def _add_names_of_programs(app: Sphinx, env: BuildEnvironment) -> None:
    """Let `objects.inv` have ``ta.linalg.matmul`` beside each whole name. Raises where one is missing."""
    found = env.domains.python_domain.objects
    for name, others in reference_domain.objects().items():
        if name not in found:
            raise ExtensionError(f"the reference lists {name}, of which no page has an object")
        entry = found[name]
        for other in others:
            found[other] = ObjectEntry(entry.docname, entry.node_id, entry.objtype, aliased=True)


def _offer_others_as_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Offer pages outside of this folder as files, because Sphinx builds none of them."""
    page = r"(?:benchmarks/results/\w+|(?:examples|plugins)/\w+/README)\.md"
    source[0] = re.sub(rf"\]\(((?:\.\./)+{page})(?:#[\w-]+)?\)", r"](<path:\1>)", source[0])


def _add_table_of_contents(app: Sphinx, docname: str, source: list[str]) -> None:
    """Make a table of contents of the links of a page that lists others, which needs no directive then."""
    if docname.rpartition("/")[2] not in {"index", "decisions"} or docname == _GUIDE:
        return
    parts = [("", source[0])]
    if docname == "index":
        # A side bar shows the captions of the first page's tables alone, so the guide's groups are there.
        guide = (Path(app.srcdir) / f"{_GUIDE}.md").read_text(encoding="utf-8")
        titles_and_tables = re.split(r"^## (.+)$", guide, flags=re.MULTILINE)[1:]
        for title, table in zip(titles_and_tables[::2], titles_and_tables[1::2], strict=True):
            parts.append((f"Guide: {title.lower()}", table.replace("](", "](guide/")))
    for caption, text in parts:
        source[0] += _hidden_toctree(caption, text, (Path(app.srcdir) / docname).parent)


def _hidden_toctree(caption: str, text: str, folder: Path) -> str:
    targets = re.findall(r"\]\(([\w/-]+)\.md\)", text)
    pages = [target for target in dict.fromkeys(targets) if (folder / f"{target}.md").is_file()]
    options = [":hidden:", *([f":caption: {caption}"] if caption else [])]
    return "\n".join(["\n", "```{toctree}", *options, "", *pages, "```", ""])
