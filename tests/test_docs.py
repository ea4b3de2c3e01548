"""The documentation reads well as it is: on a repository page, which renders plain Markdown."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from pages import PAGES, REFERENCE, ROOT, anchors, lines, name_of, prose

pytestmark = pytest.mark.docs

COLUMNS = 120
LONGEST_SENTENCE = 30
# The reference has the sentences of the docstrings.
PAGES_BY_HAND = [page for page in PAGES if page.parent != REFERENCE]

# What Sphinx and MyST would take for more than text, and the marks of a merge that was not finished.
_MARKUP = re.compile(r"^\s*(`{3,}|:{3,})\{|\{[\w:.+-]+\}`|^\s*:: |^\.\. \w|^(<{7} |={7}$|>{7} )")
_LINK = re.compile(r"(?<!!)\[((?:[^\[\]`]|`[^`]*`|\[[^\]]*\])*)\]\(([^)\s]*)\)")
_IMAGE = re.compile(r"!\[([^\]]*)\]\(([^)\s]*)\)")


def text_of(page: Path) -> str:
    """A page without its code: links may go over two lines."""
    kept = [line.text for line in lines(page) if line.fence is None]
    return re.sub(r"<!--.*?-->", "", "\n".join(kept), flags=re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_lines_of_prose_fit(page: Path) -> None:
    long = [line.number for line in prose(page) if len(line.text) > COLUMNS]
    assert long == [], f"more than {COLUMNS} columns"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_nothing_shows_as_markup(page: Path) -> None:
    shown = [
        line.number
        for line in lines(page)
        if (line.fence is None or line.is_fence) and _MARKUP.search(line.text)
    ]
    assert shown == [], "a directive, a role, or a conflict of a merge"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_has_a_text_and_leads_somewhere(page: Path) -> None:
    wrong: list[str] = []
    for text, target in [*_LINK.findall(text_of(page)), *_IMAGE.findall(text_of(page))]:
        path, _, anchor = target.partition("#")
        if "://" in target or target.startswith("mailto:"):
            found = True
        else:
            file = page if not path else (page.parent / path).resolve()
            found = file.exists() and file.is_relative_to(ROOT) and (not anchor or anchor in anchors(file))
        if not text.strip() or not found:
            wrong.append(f"[{text}]({target})")
    assert wrong == []


@pytest.mark.parametrize("page", PAGES_BY_HAND, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST_SENTENCE]
    assert long == [], f"more than {LONGEST_SENTENCE} words"


def sentences(page: Path) -> list[str]:
    """The sentences of a page's prose, each paragraph and item of a list by itself."""
    paragraphs = [""]
    for line in prose(page):
        text = line.text.strip().lstrip("> ")
        begins = re.match(r"([*\-+:]|\d+\.|#+) ", text) or not text
        if begins or line.number == 1:
            paragraphs.append("")
        paragraphs[-1] += f" {re.sub(r'^([*+:-]|[0-9]+[.]|#+) ', '', text)}"
    plain = [re.sub(r"\]\([^)]*\)", "]", paragraph) for paragraph in paragraphs]
    return [sentence for text in plain for sentence in re.split(r"(?<=[.!?:])[)\"*]* +(?=\S)", text)]


def test_every_page_can_be_reached() -> None:
    """From the README, by links alone."""
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        reached.add(page)
        for _, target in _LINK.findall(text_of(page)):
            file = (page.parent / target.partition("#")[0]).resolve()
            if file.suffix == ".md" and file.is_file() and file not in reached:
                waiting.append(file)
    missing = [name_of(page) for page in PAGES if page not in reached]
    assert missing == []


@pytest.mark.parametrize("folder", ["guide", "reference"])
def test_an_index_lists_every_page_and_names_what_is_there(folder: str) -> None:
    """Each page once, under its own title; a name in its row is one of the page."""
    index = ROOT / "docs" / folder / "index.md"
    rows = re.findall(
        r"^\| \[([^\]]+)\]\(([^)#]+)\) \| (.+) \|$", index.read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(page for _, page, _ in rows) == sorted(
        page.name for page in index.parent.glob("*.md") if page != index
    )
    for title, page, what in rows:
        text = (index.parent / page).read_text(encoding="utf-8")
        assert text.splitlines()[0] == f"# {title}"
        assert [name for name in re.findall(r"`([^`]+)`", what) if name not in text] == [], page
        if page == "command-line.md":
            commands = re.findall(r"^## ([a-z]+)$", text, re.MULTILINE)
            assert [name for name in commands if f"`{name}`" not in what] == []
