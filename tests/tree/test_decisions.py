"""Every cited design decision is on a page, and every page is cited."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "design" / "decisions"
INDEX = FOLDER.with_suffix(".md")
PAGES = sorted(FOLDER.glob("*.md"), key=lambda page: int(page.name.partition("-")[0]))
SECTIONS = ["Decision", "Why", "Turned down"]
WORDS_OF_A_PAGE, WORDS = 450, 34_900

# As it is written in code and pages: D58, "decision 58", or a link to the page.
_CITED = re.compile(r"(?<![\w\"'{])D(\d{1,3})\b|\b[Dd]ecisions?\s+\[?(\d+)\b|\bdecisions/(\d+)-")
_SOURCES = {".c", ".cpp", ".cu", ".cuh", ".h", ".js", ".md", ".py"}
# The sentences of an older guide are data.
_FOLDERS = ("benchmarks", "docs", "examples", "tests", "trio_accel")


def _numbers(page: Path) -> list[int]:
    """The decisions on a page: they are below its title."""
    line = page.read_text(encoding="utf-8").splitlines()[2]
    return [int(number) for number in re.findall(r"D(\d+)", line)]


def _cited() -> dict[int, set[str]]:
    """The citations of each decision, by its number."""
    found: dict[int, set[str]] = {}
    files = [path for folder in _FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in _SOURCES]
    for file in (*files, *ROOT.glob("*.md")):
        if file in {INDEX, Path(__file__)} or "_build" in file.parts:
            continue
        for numbers in _CITED.findall(file.read_text(encoding="utf-8")):
            found.setdefault(int("".join(numbers)), set()).add(str(file.relative_to(ROOT)))
    return found


def test_each_number_is_given_once() -> None:
    numbers = [number for page in PAGES for number in _numbers(page)]
    assert len(numbers) == len(set(numbers)) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_sections_and_its_row_in_the_index(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    title, _, numbers = text.splitlines()[:3]
    assert title.startswith("# ")
    assert re.fullmatch(r"D\d+(, D\d+)*", numbers)
    assert int(page.name.partition("-")[0]) in _numbers(page)
    sections = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    assert sections[::2] in (SECTIONS, SECTIONS[:-1])
    assert all(content.strip() for content in sections[1::2])
    assert len(text.split()) <= WORDS_OF_A_PAGE
    row = f"| [{title.removeprefix('# ')}](decisions/{page.name}) | {numbers} |"
    assert row in INDEX.read_text(encoding="utf-8").splitlines()


def test_the_index_names_each_page_once() -> None:
    linked = re.findall(r"\(decisions/([^)]+)\) \| ", INDEX.read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(page.name for page in PAGES)


def test_all_pages_together_can_be_read() -> None:
    assert sum(len(page.read_text(encoding="utf-8").split()) for page in (INDEX, *PAGES)) <= WORDS


def test_each_cited_decision_is_on_a_page() -> None:
    held = {number for page in PAGES for number in _numbers(page)}
    assert {number: where for number, where in _cited().items() if number not in held} == {}


def test_each_page_is_cited_from_outside_of_the_decisions() -> None:
    inside = str(FOLDER.relative_to(ROOT))
    cited = {
        number
        for number, where in _cited().items()
        if not all(file.startswith((inside, "benchmarks/results")) for file in where)
    }
    assert [page.name for page in PAGES if cited.isdisjoint(_numbers(page))] == []
