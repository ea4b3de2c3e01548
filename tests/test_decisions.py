"""Every design decision has a page of the same shape, and a row in the index that agrees with it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "docs" / "design" / "decisions"
INDEX = FOLDER.with_suffix(".md")
PAGES = sorted(FOLDER.glob("*.md"), key=lambda page: int(page.name.partition("-")[0]))
SECTIONS = ["Context", "Decision", "Consequences", "Figures"]


def test_each_number_is_given_once() -> None:
    """Numbers have gaps: what explains a single line has become a comment beside it."""
    numbers = [int(page.name.partition("-")[0]) for page in PAGES]
    assert len(numbers) == len(set(numbers)) > 50


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_sections_and_its_row_in_the_index(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    number = f"D{int(page.name.partition('-')[0])}"
    title = re.match(rf"# {number}: (.+)\n", text)
    facts = re.search(rf"^\| {number} \| (.+) \| (.+) \|$", text, re.MULTILINE)
    assert title is not None
    assert facts is not None
    sections = re.split(r"^## (.+)$", text, flags=re.MULTILINE)[1:]
    assert sections[::2] == SECTIONS
    assert all(content.strip() for content in sections[1::2])
    status, area = facts.groups()
    row = f"| [{number}](decisions/{page.name}) | {title[1]} | {status} |"
    index = INDEX.read_text(encoding="utf-8")
    assert row in index.partition(f"\n## {area.capitalize()}\n")[2].partition("\n## ")[0]


def test_the_index_names_each_page_once() -> None:
    linked = re.findall(r"\(decisions/([^)]+)\) \| ", INDEX.read_text(encoding="utf-8"))
    assert sorted(linked) == sorted(page.name for page in PAGES)


def test_links_between_decisions_lead_to_pages() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).is_file(), f"{page.name}: {target}"
