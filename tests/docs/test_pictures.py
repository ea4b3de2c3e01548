"""The pictures of the README, and the program that makes them of a run."""

from __future__ import annotations

import importlib
import re
from pathlib import Path
from types import ModuleType
from xml.etree import ElementTree as ET

import pytest

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def shown() -> list[Path]:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return [ROOT / path for path in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", text)]


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(ROOT / "docs")
    return importlib.import_module("pictures.drawn_terminal")


def test_the_readme_shows_the_purpose_of_the_project() -> None:
    assert ROOT / "docs/pictures/recover.svg" in shown()


@pytest.mark.parametrize("path", sorted(ROOT.glob("docs/pictures/*.svg")), ids=lambda path: path.name)
def test_a_picture_needs_nothing_from_elsewhere(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text) < 200_000
    root = ET.fromstring(text)
    assert {element.tag for element in root.iter()} <= {
        SVG + name for name in ("svg", "title", "desc", "style", "rect", "circle", "g", "text")
    }
    without_names = text.replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"http|url\(|@import|@font-face|href|\bon[a-z]+=", without_names)


def test_the_picture_is_of_a_run_that_lost_nothing() -> None:
    last = ET.parse(ROOT / "docs/pictures/recover.svg").findtext(f"{SVG}desc", "")
    assert "SIGKILL to the worker process" in last
    assert last.count("identical") == 4
    assert "all 6 checks hold" in last


def test_inverted_text_has_a_background(make: ModuleType) -> None:
    terminal = make.Terminal("test", 80, 2)
    screen = make.Screen(0.0, ("\x1b[7mab\x1b[0m c", ""))
    root = ET.fromstring(make.draw([screen], terminal, "a command"))
    [rect] = [rect for rect in root.iter(f"{SVG}rect") if rect.get("fill") == make.PLAIN]
    assert float(rect.get("width", "")) == pytest.approx(2 * make.WIDTH, abs=0.1)
    assert [text.get("style") for text in root.iter(f"{SVG}text")] == [f"fill:{make.GROUND}", None]


def test_lines_come_and_go_with_the_screens(make: ModuleType) -> None:
    terminal = make.Terminal("test", 80, 5)
    rows = [""] * 3
    first = make.Screen(0.0, ("$ \x1b[1mrun\x1b[0m", "a & b", *rows))
    second = make.Screen(2.0, ("$ \x1b[1mrun\x1b[0m", "  \x1b[32mright\x1b[39m", *rows))
    last = make.Screen(6.0, ("$ \x1b[1mrun\x1b[0m", "  \x1b[32mright\x1b[39m", *rows))
    root = ET.fromstring(make.draw([first, second, last], terminal, "a command"))
    groups = [([text.text for text in group], group.get("class")) for group in root.iter(f"{SVG}g")]
    assert groups == [(["$", "run"], None), (["a & b"], "l k0"), (["right"], "l k1 end")]
    style = root.findtext(f"{SVG}style", "")
    whole = 6.0 + make.LAST_SECONDS
    # Two of all seconds, and then the other line to the end.
    change = f"{100 * 2 / whole:.2f}%"
    assert f"@keyframes k0 {{ {change} {{ visibility: hidden }} 0.00% {{ visibility: visible }} }}" in style
    assert f"@keyframes k1 {{ 0% {{ visibility: hidden }} {change} {{ visibility: visible }} }}" in style
    right = next(text for text in root.iter(f"{SVG}text") if text.text == "right")
    assert float(right.get("x", "")) == pytest.approx(make.MARGIN + 2 * make.WIDTH, abs=0.1)
    assert right.get("style") == f"fill:{make.COLOURS[2]}"
