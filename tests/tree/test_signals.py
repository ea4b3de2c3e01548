"""Signals go to the intended processes, and never to the group of the program that sends them."""

from __future__ import annotations

import ast
import importlib
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import trio

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "docs", "examples", "tests", "trio_accel")


def careless_kills(source: str) -> list[int]:
    """Find calls of `kill` and `killpg` with a process that may be 0 or -1: the lines of a source."""
    return sorted(call.lineno for call in kills(ast.parse(source)) if is_careless(call.args[0]))


def kills(tree: ast.AST) -> Iterator[ast.Call]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and node.args and isinstance(node.func, ast.Attribute):
            of = node.func.value
            if node.func.attr in {"kill", "killpg"} and isinstance(of, ast.Name) and of.id == "os":
                yield node


def is_careless(pid: ast.expr) -> bool:
    if isinstance(pid, ast.BoolOp):
        return True
    if isinstance(pid, ast.IfExp):
        return is_careless(pid.body) or is_careless(pid.orelse)
    return isinstance(pid, (ast.Constant, ast.UnaryOp))


@pytest.mark.lint
def test_no_process_with_a_possible_number_0_is_killed() -> None:
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    found = {str(path): careless_kills(path.read_text("utf-8")) for path in paths}
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_careless_kills_are_found() -> None:
    careless = ["os.kill(pid or 0, 9)", "os.killpg(0, 9)", "os.kill(-1, 9)", "os.kill(1 if x else 0, 9)"]
    assert [careless_kills(line) for line in careless] == [[1]] * 4
    assert careless_kills("os.kill(pid, 0)\nos.kill(f(0), 9)\nprocess.kill()") == []


async def test_a_training_kills_nothing_while_a_device_has_no_worker(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    training = importlib.import_module("training")
    pids, sent = iter([None, 7, None, 8]), list[tuple[int, int]]()

    class Device:
        async def statistics(self) -> object:
            return SimpleNamespace(pid=next(pids))

    monkeypatch.setattr(training, "KINDS", ("kill", "stop"))
    monkeypatch.setattr(os, "kill", lambda *given: sent.append(given))
    with trio.move_on_after(4.5):
        await training.disturb([Device()], 1.0)
    assert sent == [(7, training.signal.SIGSTOP), (8, training.signal.SIGSTOP)]
