"""Sphinx configuration: the Markdown pages as they are, warnings are errors (see noxfile.py)."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parent))

import make_reference

if TYPE_CHECKING:
    from sphinx.application import Sphinx

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

myst_heading_anchors = 4  # the same anchors as on a repository page


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.connect("source-read", _fill_reference)
    app.connect("source-read", _add_table_of_contents)
    app.connect("source-read", _offer_results_as_files)


def _fill_reference(app: Sphinx, docname: str, source: list[str]) -> None:
    """Put the entries of the docstrings in place of the names that a page of the reference lists."""
    path = Path(app.srcdir) / f"{docname}.md"
    if path.parent == make_reference.PAGES:
        source[0] = make_reference.generated()[path]


def _offer_results_as_files(app: Sphinx, docname: str, source: list[str]) -> None:
    """Results of measurements are beside these pages, not among them: MyST takes ``path:`` for a file."""
    source[0] = re.sub(
        r"\]\(((?:\.\./)+benchmarks/results/\w+\.md)(?:#[\w-]+)?\)", r"](<path:\1>)", source[0]
    )


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
