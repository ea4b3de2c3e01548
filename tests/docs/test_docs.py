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

# Text that Sphinx and MyST would take for markup, and the marks of an unfinished merge.
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


# Including pages that only a forge renders.
EVERY_PAGE = sorted({*PAGES, *ROOT.glob("*.md"), *ROOT.glob("examples/**/*.md"), *ROOT.glob("changes/*.md")})
# Only an ordered list that begins with 1 may follow a paragraph without an empty line.
_ITEM = re.compile(r" *([*+-]|1[.)]) +\S")
_NESTED = re.compile(r" *([*+-]|\d+[.)]) +\S")
_CODE = re.compile(r"(?<!`)(`+)(?!`)(.+?)(?<!`)\1(?!`)", re.DOTALL)


def damage(page: Path) -> list[str]:
    """Effects of formatters on a page: blocks joined to the text before or after them."""
    found: list[str] = []
    paragraph: list[str] = []
    before, fences = "", 0
    every = list(lines(page))
    for line, after in zip(every, [*every[1:], None], strict=True):
        text = line.text
        if line.fence is not None or line.is_fence:
            fences += line.is_fence
            if fences % 2 and line.is_fence and not line.fence:
                found.append(f"{line.number}: a fence without a language")
            if fences % 2 and line.is_fence and _is_text(before):
                found.append(f"{line.number}: a fence that is joined to the text before it")
            if not fences % 2 and line.is_fence and after is not None and _is_text(after.text):
                found.append(f"{line.number}: a fence that is joined to the text after it")
            found += unclosed(paragraph, line.number)
            before = ""
            continue
        found += [f"{line.number}: {told}" for told in joined(before, text)]
        if not text.strip() or text.startswith(("|", "#")) or _NESTED.match(text):
            found += unclosed(paragraph, line.number)
        if text.strip():
            paragraph.append(text)
        before = text
    if fences % 2:
        found.append("a fence without an end")
    return found + unclosed(paragraph, len(every))


def _is_text(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith(("<!--", ">"))


def joined(before: str, text: str) -> list[str]:
    """Which blocks of two lines that follow one another are joined."""
    is_heading = re.match(r"#{1,6} ", text)
    was_item = _ITEM.match(before) or before.startswith("  ")
    told = {
        "a heading that is joined to the text before it": is_heading and _is_text(before),
        "a heading that is joined to the text after it": re.match(r"#{1,6} ", before) and _is_text(text),
        "a list that is joined to the text before it": (
            _ITEM.match(text) and _is_text(before) and not was_item and not text.startswith("  ")
        ),
        "a text that becomes a part of a list": (
            was_item and _is_text(text) and not text.startswith((" ", "|", "#")) and not _NESTED.match(text)
        ),
        "a table that is joined to the text before it": (
            text.startswith("|") and _is_text(before) and not before.startswith("|")
        ),
        "a text that becomes a row of a table": (
            before.startswith("|") and _is_text(text) and not text.startswith("|")
        ),
        "a fence within a text": "```" in text,
        "an item of a list within a text": re.search(r"[.;:] [*+-] (\S)", _CODE.sub("", text)),
    }
    return [name for name, is_so in told.items() if is_so]


def unclosed(paragraph: list[str], end: int) -> list[str]:
    """Look for code begun in a paragraph, and not ended; empties the list."""
    text = "\n".join(paragraph)
    paragraph.clear()
    return [f"{end}: code without an end above"] if "`" in _CODE.sub("", text) else []


@pytest.mark.parametrize("page", EVERY_PAGE, ids=name_of)
def test_no_block_is_joined_to_another(page: Path) -> None:
    # The lines of a skill's head are not text.
    assert [one for one in damage(page) if not (page.name == "SKILL.md" and one.startswith("5: "))] == []


DAMAGED = {
    "a fence within a text": "It runs: ```python import x\n\ny = 1\n",
    "a fence without an end": "It runs:\n\n```python\nimport x\n",
    "a fence without a language": "It runs:\n\n```\nimport x\n```\n",
    "a fence that is joined to the text before it": "It runs:\n```python\nimport x\n```\n",
    "a fence that is joined to the text after it": "```python\nimport x\n```\nIt runs.\n",
    "a heading that is joined to the text before it": "It runs.\n## Next\n",
    "a heading that is joined to the text after it": "## Next\nIt runs.\n",
    "a list that is joined to the text before it": "It has\n* one\n* two\n",
    "a text that becomes a part of a list": "* one\n* two\nIt has both.\n",
    "a table that is joined to the text before it": "It has\n| a | b |\n|---|---|\n| 1 | 2 |\n",
    "a text that becomes a row of a table": "| a | b |\n|---|---|\n| 1 | 2 |\nIt has both.\n",
    "an item of a list within a text": "It has both. * One is more.\n",
    "code without an end above": "It has `x == y\n\n* (x // y)` and more.\n",
}


@pytest.mark.parametrize("kind", DAMAGED)
def test_damage_is_found(kind: str, tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Page\n\nIt is fine: `1 * 2`.\n\n{DAMAGED[kind]}", encoding="utf-8")
    assert any(one.endswith(kind) for one in damage(page)), damage(page)
    page.write_text(
        "# Page\n\nIt is fine:\n\n* `a * b`, and\n  more\n    1. nested\n\n"
        "| a | b |\n|---|---|\n| 1 | `2` |\n\n"
        "It runs `for\na while`, in\n1998. It ends.\n\n```text\n# no heading\n* no list `\n```\n",
        encoding="utf-8",
    )
    assert damage(page) == []


@pytest.mark.parametrize("page", PAGES_BY_HAND, ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    long = [sentence for sentence in sentences(page) if len(sentence.split()) > LONGEST_SENTENCE]
    assert long == [], f"more than {LONGEST_SENTENCE} words"


def sentences(page: Path) -> list[str]:
    """The sentences of a page's prose, each paragraph and item of a list on its own."""
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
    """From the README, only by links."""
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
def test_an_index_lists_every_page_and_names_existing_pages(folder: str) -> None:
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


def test_the_section_on_swaps_names_the_wait_of_the_driver() -> None:
    """Who plans a swap on one GPU must know that a fault of the old model may hold the new one."""
    page = (ROOT / "docs" / "guide" / "patterns.md").read_text(encoding="utf-8")
    section = page.partition("SwapFailedError")[2].partition("\n## ")[0]
    assert re.search(r"\d+ s for the\s+driver\]\(failures.md#how-a-loss-is-noticed\)", section)
