"""Fragments of pages that do not run: their names exist, and accept the arguments."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from chosen import ROOT

import trio_accel as ta
from trio_accel import patterns

pytestmark = pytest.mark.no_device

FRAGMENT = re.compile(r"<!-- not run -->\n```python\n(.*?)```", re.DOTALL)
PACKAGES = (
    "patterns", "testing", "telemetry", "replay", "programs", "collectives", "train", "cluster", "jit",
    "agents", "arrays", "nn", "linalg", "fft", "random", "sparse",
)  # fmt: skip
# Of `spawn` itself; the others are the actor's.
OF_SPAWN = frozenset(inspect.signature(ta.System.spawn).parameters)


def fragments() -> Iterator[tuple[str, ast.Module]]:
    for page in sorted((ROOT / "docs").rglob("*.md")):
        for number, found in enumerate(FRAGMENT.finditer(page.read_text("utf-8"))):
            # An `await` is in a function.
            code = "async def fragment():\n" + textwrap.indent(found[1], "    ")
            yield f"{page.relative_to(ROOT)}-{number}", ast.parse(code)


FRAGMENTS = dict(fragments())


def named(node: ast.expr) -> Any:
    """Find the object named by an expression: in the package, or in an import of the page; None elsewhere.

    Raises:
        AttributeError: The name does not exist.
    """
    if isinstance(node, ast.Name):
        if node.id == "ta":
            return ta
        places = [importlib.import_module(f"trio_accel.{one}") for one in PACKAGES]
        found = [getattr(one, node.id) for one in (*places, ta) if hasattr(one, node.id)]
        # The name of a module is a variable in a fragment.
        return next((one for one in found if not inspect.ismodule(one)), None)
    if isinstance(node, ast.Attribute):
        owner = named(node.value)
        return getattr(owner, node.attr) if inspect.ismodule(owner) or inspect.isclass(owner) else None
    return None


def parameters(function: Any) -> frozenset[str] | None:
    """Return the names that a function takes; None for any."""
    try:
        found = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return None if any(one.kind is one.VAR_KEYWORD for one in found.values()) else frozenset(found)


@pytest.mark.parametrize("name", FRAGMENTS)
def test_a_fragment_names_existing_things(name: str) -> None:
    for node in ast.walk(FRAGMENTS[name]):
        if isinstance(node, ast.Attribute):
            named(node)
        if not isinstance(node, ast.Call):
            continue
        given = {one.arg for one in node.keywords if one.arg is not None}
        called = named(node.func)
        if isinstance(node.func, ast.Attribute) and node.func.attr == "spawn" and node.args:
            actor = node.args[0]
            called = getattr(patterns, actor.id, None) if isinstance(actor, ast.Name) else None
            given -= OF_SPAWN
        taken = None if called is None else parameters(called)
        assert taken is None or given <= taken, ast.unparse(node)


def test_there_are_fragments() -> None:
    assert len(FRAGMENTS) > 40
    assert all(Path(ROOT, name.rpartition("-")[0]).exists() for name in FRAGMENTS)
