"""The reference is made from the docstrings, has every public name, and no other."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from make_reference import INTERNAL, entries_of
from pages import REFERENCE, ROOT, read

import trio_accel as ta

pytestmark = pytest.mark.docs


def text() -> str:
    return "\n".join(read(path) for path in sorted(REFERENCE.glob("*.md")))


def entries() -> list[tuple[str, str]]:
    return [
        entry for path in REFERENCE.glob("*.md") for entry in entries_of(path.read_text(encoding="utf-8"))
    ]


MODULES = sorted({where for where, _ in entries()})


def test_a_command_writes_the_pages(tmp_path: Path) -> None:
    program = str(ROOT / "docs" / "make_reference.py")
    subprocess.run([sys.executable, program, str(tmp_path / "new")], check=True, cwd=tmp_path)
    pages = {path.name: path.read_text(encoding="utf-8") for path in (tmp_path / "new").iterdir()}
    assert pages == {path.name: read(path) for path in REFERENCE.glob("*.md")}


def test_no_entry_is_committed() -> None:
    """Each is made from a docstring when the pages are built."""
    committed = "\n".join(path.read_text(encoding="utf-8") for path in REFERENCE.glob("*.md"))
    headings = set(re.findall(r"^### (\w+)$", committed, re.MULTILINE))
    assert headings & {name for _, name in entries()} == set()
    assert all(re.search(rf"^### {name}$", text(), re.MULTILINE) for _, name in entries())


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_entry_or_is_named_as_internal(module: str) -> None:
    public = set(importlib.import_module(module).__all__)
    listed = [name for where, name in entries() if where == module]
    assert len(listed) == len(set(listed))
    internal = INTERNAL.get(module, frozenset())
    assert set(listed) | internal == public
    assert set(listed) & internal == set()


def test_every_name_of_the_package_has_an_entry() -> None:
    names = {name for _, name in entries()}
    modules = {name for name in ta.__all__ if isinstance(getattr(ta, name), ModuleType)}
    assert {f"trio_accel.{name}" for name in modules} <= set(MODULES)
    assert set(ta.__all__) - modules - names == {"__version__"}


@pytest.mark.parametrize(
    "name", ["look_last", "idle_actor", "validated", "behind", "fail_as_crash", "launch_here"]
)
def test_what_the_runtime_keeps_for_itself_has_none(name: str) -> None:
    assert not re.search(rf"^#+ (\w+\.)?{name}$", text(), re.MULTILINE)


@pytest.mark.parametrize(
    "entry",
    [
        "| `RESUME` | It is a reply: the asker gets the exception itself, the actor lives on",
        "| `ONE_FOR_ALL` | All children: the others are ended in reverse start order, then",
        "| `isolation` | `Isolation` | Where its context lives: in a worker process, or in this one. |",
    ],
)
def test_a_colon_in_a_docstring_is_a_part_of_the_sentence(entry: str) -> None:
    assert entry in text()
