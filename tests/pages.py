"""The pages of the documentation, and their contents."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from make_reference import generated

ROOT = Path(__file__).parents[1]
REFERENCE = ROOT / "docs" / "reference"
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "changes/README.md")),
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts),
    *sorted((ROOT / "benchmarks" / "results").glob("*.md")),
]

_FENCE = re.compile(r"( *)(`{3,}|~{3,})(.*)$")
_HEADING = re.compile(r"#{1,6} (.+)$")


@dataclass
class Line:
    """A line of a page.

    Attributes:
        number: Its number in the file, from 1.
        text: The line.
        fence: The word after its opening fence, such as ``"python"``; None outside of fences.
        is_fence: Whether it begins or ends a fence.
    """

    number: int
    text: str
    fence: str | None = None
    is_fence: bool = False


@dataclass
class Block:
    """A fenced block.

    Attributes:
        language: The word after the opening fence.
        number: The line of the fence.
        text: Its contents, without the indent.
        mark: The comment on the line above, such as ``"not run"``; empty without one.
        before: The lines between the block before this one, or the heading, and this one.
    """

    language: str
    number: int
    text: str
    mark: str
    before: str


def name_of(page: Path) -> str:
    """Its path from the root of the repository."""
    return page.relative_to(ROOT).as_posix()


def read(page: Path) -> str:
    """The text of a page; a page of the reference has its entries, as in the web pages."""
    return generated().get(page) or page.read_text(encoding="utf-8")


def lines(page: Path) -> Iterator[Line]:
    """The lines of a page."""
    closing = ""
    language: str | None = None
    for number, text in enumerate(read(page).splitlines(), 1):
        match = _FENCE.match(text)
        if closing:
            is_end = match is not None and match[2] == closing and not match[3]
            yield Line(number, text, language, is_fence=is_end)
            if is_end:
                closing, language = "", None
        elif match is not None:
            closing, language = match[2], match[3].strip()
            yield Line(number, text, language, is_fence=True)
        else:
            yield Line(number, text)


def prose(page: Path) -> Iterator[Line]:
    """The lines outside of code, tables and comments."""
    is_comment = False
    for line in lines(page):
        is_comment = is_comment or line.text.lstrip().startswith("<!--")
        if line.fence is None and not is_comment and not line.text.lstrip().startswith("|"):
            yield line
        is_comment = is_comment and "-->" not in line.text


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page."""
    found: list[Block] = []
    before: list[str] = []
    body: list[str] = []
    start: Line | None = None
    for line in lines(page):
        if line.fence is None:
            before = [] if _HEADING.match(line.text) else [*before, line.text.strip()]
        elif not line.is_fence:
            body.append(line.text)
        elif start is None:
            start = line
        else:
            indent = len(start.text) - len(start.text.lstrip())
            mark = re.fullmatch(r"<!-- (.+) -->", before[-1]) if before else None
            found.append(
                Block(
                    language=start.fence or "",
                    number=start.number,
                    text="".join(f"{text[indent:]}\n" for text in body),
                    mark="" if mark is None else mark[1],
                    before=" ".join(text for text in before if text),
                )
            )
            start, body, before = None, [], []
    return found


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as repository pages make them."""
    seen: dict[str, int] = {}
    found: set[str] = set()
    for line in lines(page):
        heading = None if line.fence is not None else _HEADING.match(line.text)
        if heading is not None:
            plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading[1]).lower()
            anchor = re.sub(r"[^\w\- ]", "", plain).strip().replace(" ", "-")
            number = seen[anchor] = seen.get(anchor, -1) + 1
            found.add(f"{anchor}-{number}" if number else anchor)
    return found
