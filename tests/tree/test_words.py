"""No kind of text gets worse: the rates of vague wording that `python tests/words.py` counts have bounds.

A bound is the rate of the day it was set, or the target of `tests/words.py` if that is met. Who improves a
kind of text lowers its bounds.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from words import MARKERS, rates, read, target, uses_of_names, vague_names

pytestmark = pytest.mark.lint

ROOT = Path(__file__).parents[2]
# Hits in 1000 words.
BOUNDS: dict[str, dict[str, float]] = {
    "readme": {},
    "pages": {},
    "docstrings": {},
    "comments": {},
    "errors": {},
}
# The same for the docstrings and comments of the tests. The stand-in driver counts as "stands".
BOUNDS_OF_TESTS: dict[str, dict[str, float]] = {
    "docstrings": {"stands": 1.5, "of .. of": 0.9},
    "comments": {
        "those of": 0.9,
        "stands": 1.3,
        "is no": 1.1,
        "has it": 0.6,
        "of .. of": 1.0,
        "because": 3.9,
    },
}
# Names of tests with a clause in place of a noun: test_what_is_no_array, test_a_folder_that_is_missing.
CLAUSE = re.compile(r"_what(ever)?_|_that_(is|are|was|were)_")
# Names such as `found` and `one`, which say only that a value exists.
# `where` and `x.at` have the names that the field gives them.
VAGUE_NAMES = {"constant": 0, "parameter": 6, "function": 5, "variable": 6}
# Tables whose columns the formatter would break, in the package, the tests and all else.
SKIPS = 60
# Two lines with such a run of equal words are both sides of a merge, unless the second line begins an entry.
_MERGED_WORDS = 8
_ENTRY = re.compile(r"\s*([*|>#-]|\d+\.|[`*]*[\w., ]+[`*]*:\s)")
# A bound that is further from the rate than this has to be renewed.
_SLACK = 0.6


@pytest.fixture(scope="module")
def found() -> dict[str, dict[str, float]]:
    examples = sorted((ROOT / "examples").glob("*/README.md"))
    places = (ROOT / "README.md", *examples, ROOT / "docs" / "guide", ROOT / "trio_accel")
    return rates([text for place in places for text in read(place)])


def check(rates_of_kind: dict[str, float], kind: str, bounds: dict[str, float]) -> None:
    hit = 1000 / rates_of_kind[""]
    worse, better = [], []
    for marker in MARKERS:
        rate, goal = rates_of_kind[marker.name], target(marker, kind)
        bound = bounds.get(marker.name, goal)
        if bound is None:
            continue
        text = f"{marker.name}: {rate:.2f} in 1000 words, and the bound is {bound}: {marker.cure}"
        if (rate < bound - hit) if marker.wanted else (rate > bound + hit):
            worse.append(text)
        elif bound != goal and abs(rate - bound) > _SLACK + hit:
            better.append(text)
    assert not worse, "\n".join(["python tests/words.py shows the places:", *worse])
    assert not better, "\n".join(["set new bounds:", *better])


@pytest.mark.parametrize("kind", BOUNDS)
def test_no_kind_of_text_gets_worse(found: dict[str, dict[str, float]], kind: str) -> None:
    check(found[kind], kind, BOUNDS[kind])


def test_the_tests_are_written_as_plainly_as_the_package() -> None:
    of_tests = rates([text for text in read(ROOT / "tests") if text.kind in BOUNDS_OF_TESTS])
    for kind, bounds in BOUNDS_OF_TESTS.items():
        assert of_tests[kind][""] > 20_000
        check(of_tests[kind], kind, bounds)


def test_the_names_of_tests_state_a_rule() -> None:
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("*.py")]
    names = [name for text in texts for name in re.findall(r"def (test_\w+)", text)]
    assert len(names) > 5000
    assert not [name for name in names if CLAUSE.search(name)], "name the thing, and say what it does"


def test_the_package_has_prose_to_look_at(found: dict[str, dict[str, float]]) -> None:
    assert found["docstrings"][""] > 100_000
    assert found["errors"][""] > 10_000


def test_names_describe_their_values() -> None:
    uses, _ = uses_of_names([ROOT / "trio_accel"])
    for kind, bound in VAGUE_NAMES.items():
        names = vague_names(uses, kind)
        assert sum(files.total() for _, files in names) <= bound, f"{kind}s: {dict(names)}"


def test_the_formatter_is_switched_off_for_few_tables() -> None:
    own = [path for path in ROOT.iterdir() if path.name[0] != "."]
    texts = [
        path.read_text() for top in own for path in [*top.rglob("*.py")] or [top] if path.suffix == ".py"
    ]
    assert len(texts) > 1000
    assert sum(text.count("  # fmt" + ": skip\n") for text in texts) <= SKIPS


def docstrings(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def merged(text: str) -> list[str]:
    """List each line that repeats words of the line before it."""

    def runs(line: str) -> set[tuple[str, ...]]:
        words = re.findall(r"[A-Za-z][\w.,'`-]*", line)
        return {tuple(words[place:][:_MERGED_WORDS]) for place in range(len(words) - _MERGED_WORDS + 1)}

    lines = pairwise(text.splitlines())
    return [line.strip() for before, line in lines if not _ENTRY.match(line) and runs(before) & runs(line)]


def test_no_text_has_both_sides_of_a_merge() -> None:
    folders = ("trio_accel", "tests", "examples", "benchmarks")
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    pages = [path.read_text() for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]]
    texts = [*pages, *[text for source in sources for text in docstrings(source)]]
    assert [line for text in texts for line in merged(text)] == []
    both = "It takes the nearest integer, and 0 or the smallest one for NaN.\nthe nearest integer, and 0 or "
    assert merged(f"{both}the least one.") == []
    assert len(merged(f"{both}the smallest one of all for NaN.")) == 1
