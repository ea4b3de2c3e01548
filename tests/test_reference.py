"""The reference is made from the docstrings, has every public name, and no other."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys

import pytest
from pages import REFERENCE, ROOT

import trio_accel as ta

sys.path.insert(0, str(ROOT / "docs"))

from make_reference import INTERNAL

_BLOCK = re.compile(r"<!-- reference: (\S+)\s+(.*?)\s*-->", re.DOTALL)

MODULES = (
    "trio_accel.actors",
    "trio_accel.arrays",
    "trio_accel.backends.base",
    "trio_accel.backends.base.ops",
    "trio_accel.devices",
    "trio_accel.fft",
    "trio_accel.interop",
    "trio_accel.jit",
    "trio_accel.linalg",
    "trio_accel.patterns",
    "trio_accel.programs",
    "trio_accel.random",
    "trio_accel.sparse",
    "trio_accel.telemetry",
    "trio_accel.testing",
    "trio_accel.testing.fixtures",
    "trio_accel.weights",
)


def text() -> str:
    return "\n".join(path.read_text(encoding="utf-8") for path in sorted(REFERENCE.glob("*.md")))


def listed(module: str) -> list[str]:
    return [name for where, names in _BLOCK.findall(text()) if where == module for name in names.split()]


def test_docs_make_reference_was_run() -> None:
    program = str(ROOT / "docs" / "make_reference.py")
    done = subprocess.run([sys.executable, program, "--check"], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.fail(f"run: python docs/make_reference.py\n{done.stderr}", pytrace=False)


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_has_an_entry_or_is_named_as_internal(module: str) -> None:
    public = set(importlib.import_module(module).__all__)
    entries = listed(module)
    assert len(entries) == len(set(entries))
    internal = INTERNAL.get(module, frozenset())
    assert set(entries) | internal == public
    assert set(entries) & internal == set()


def test_every_name_of_the_package_has_an_entry() -> None:
    names = {name for _, names in _BLOCK.findall(text()) for name in names.split()}
    modules = {
        "arrays",
        "fft",
        "graphs",
        "interop",
        "jit",
        "linalg",
        "patterns",
        "programs",
        "random",
        "sparse",
        "telemetry",
        "testing",
        "weights",
        "__version__",
    }
    assert set(ta.__all__) - modules - names == set()


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
