"""No test passes or fails by how busy the machine is: sleeps and time limits of real clocks are counted.

A test waits for an event, for `trio.testing.wait_all_tasks_blocked`, or in a `while` loop for a condition. If
time is its subject, its clock is Trio's mock clock. A test that needs a real clock has the marker `alone`,
or a comment `# clock: ` that says why a busy machine does not change the verdict.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

import pytest

pytestmark = pytest.mark.no_device

ROOT = Path(__file__).parents[2]
SLEEPS = {"trio.sleep", "trio.sleep_until", "time.sleep"}
CLOCKS = re.compile(r"\b(perf_counter|monotonic|current_time)(_ns)?\(")
WORDS = re.compile(r"\bsleep|\bfail_after|\bperf_counter|\bmonotonic|\bcurrent_time")
MOCKED = re.compile(r"autojump_clock|mock_clock|MockClock")
# Whole modules with tests that run without company, or on hardware of their own.
APART = re.compile(r"\bmark\.(alone|gpu|ray)\b")
# Seconds of a time limit that ends what hangs, and does not measure.
GENEROUS = 10
# A sleep of this many seconds represents an operation without an end of its own.
ENDLESS = 20
# Helpers that pass time for callers with a mock clock.
FOR_MOCK_CLOCKS = {
    "cluster/fake_cluster.py",
    "patterns/continuous.py",
    "patterns/growing.py",
    "patterns/replica_models.py",
}
KINDS = ("sleep", "bound", "limit")

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


class Module:
    """A module of tests, in which functions are looked up by name."""

    def __init__(self, path: Path) -> None:
        text = path.read_text(encoding="utf-8")
        self.path, self.lines, self.tree = path, text.splitlines(), ast.parse(text)
        self.parents = {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}
        functions = [node for node in ast.walk(self.tree) if isinstance(node, Function)]
        self.texts = {node: ast.unparse(node) for node in functions}
        self.words = {node: {*re.findall(r"\w+", text)} for node, text in self.texts.items()}
        self.mocked: set[ast.AST] = {node for node, text in self.texts.items() if MOCKED.search(text)}

    def _hand_on(self) -> None:
        """Give a helper the clock of its callers, and a function the clock of the helper that runs it."""
        count = -1
        while count < len(self.mocked):
            count = len(self.mocked)
            for node in self.texts.keys() - self.mocked:
                if node.name.startswith("test_"):
                    runs = self.words[node] & {
                        one.name for one in self.mocked if MOCKED.search(self.texts[one])
                    }
                    if any(not name.startswith("test_") for name in runs):
                        self.mocked.add(node)
                    continue
                outer = set(self.around(node))
                callers = [one for one in self.texts.keys() - {node} - outer if node.name in self.words[one]]
                if callers and all(self.is_mocked(one) for one in callers):
                    self.mocked.add(node)

    def around(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield the nodes that a node is in, from the inside."""
        while (parent := self.parents.get(node)) is not None:
            yield parent
            node = parent

    def is_mocked(self, node: ast.AST) -> bool:
        return node in self.mocked or any(one in self.mocked for one in self.around(node))

    def is_explained(self, node: ast.expr | ast.stmt) -> bool:
        """Return whether the line, or a comment directly above it, has `# clock: `."""
        if "# clock: " in self.lines[node.lineno - 1]:
            return True
        for line in reversed(self.lines[: node.lineno - 1]):
            if not line.strip().startswith("#"):
                return False
            if "# clock: " in line:
                return True
        return False

    def is_apart(self, node: ast.AST) -> bool:
        """Return whether it is in a test, or a module, that runs without company."""
        marks = [
            one for one in self.tree.body if isinstance(one, ast.Assign) and "pytestmark" in ast.unparse(one)
        ]
        outer = [one for one in self.around(node) if isinstance(one, Function)]
        texts = [ast.unparse(one) for function in outer for one in function.decorator_list]
        return any(APART.search(text) for text in [*map(ast.unparse, marks), *texts])

    def is_polling(self, node: ast.AST) -> bool:
        """Return whether it is repeated until a condition holds."""
        for one in self.around(node):
            if isinstance(one, ast.While):
                return True
            if isinstance(one, Function):
                return False
        return False

    def findings(self) -> Iterator[tuple[str, int]]:
        """Yield the kinds and lines of checks that a busy machine could change."""
        found = [(kind, node) for node in ast.walk(self.tree) if (kind := self._kind(node))]
        if found:
            self._hand_on()
        for kind, node in found:
            assert isinstance(node, ast.expr | ast.stmt)
            if not (self.is_mocked(node) or self.is_apart(node) or self.is_explained(node)):
                yield kind, node.lineno

    def _kind(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.Call) and len(node.args) == 1 and not isinstance(node.args[0], ast.Starred):
            name, given = ast.unparse(node.func), node.args[0]
            seconds = given.value if isinstance(given, ast.Constant) else None
            is_short = not isinstance(seconds, int | float) or 0 < seconds < ENDLESS
            if name in SLEEPS and is_short and not self.is_polling(node):
                return "sleep"
            if name == "trio.fail_after" and isinstance(seconds, int | float) and 0 < seconds < GENEROUS:
                return "limit"
        if isinstance(node, ast.Assert) and self._has_upper_bound(node):
            return "bound"
        return None

    def _has_upper_bound(self, node: ast.Assert) -> bool:
        scope = next((one for one in self.around(node) if isinstance(one, Function)), self.tree)
        measured = {
            target.id
            for one in ast.walk(scope)
            if isinstance(one, ast.Assign) and CLOCKS.search(ast.unparse(one.value))
            for target in one.targets
            if isinstance(target, ast.Name)
        }
        for compare in (one for one in ast.walk(node.test) if isinstance(one, ast.Compare)):
            sides = [compare.left, *compare.comparators]
            for number, operator in enumerate(compare.ops):
                less, more = sides[number], sides[number + 1]
                if isinstance(operator, ast.Gt | ast.GtE):
                    less, more = more, less
                elif not isinstance(operator, ast.Lt | ast.LtE):
                    continue
                names = {one.id for one in ast.walk(less) if isinstance(one, ast.Name)}
                is_time = bool(CLOCKS.search(ast.unparse(less)) or names & measured)
                # A time compared with another one is ordered, and not bounded.
                is_order = bool(CLOCKS.search(ast.unparse(more))) or not isinstance(
                    more, ast.Constant | ast.BinOp
                )
                is_large = isinstance(more, ast.Constant) and more.value >= GENEROUS
                if is_time and not is_order and not is_large:
                    return True
        return False


def test_a_busy_machine_changes_no_verdict() -> None:
    found: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for path in sorted([*ROOT.glob("tests/**/*.py"), *ROOT.glob("plugins/*/tests/**/*.py")]):
        name = path.relative_to(ROOT).as_posix()
        if name.removeprefix("tests/") in FOR_MOCK_CLOCKS or name.startswith("tests/gpu/"):
            continue
        if not WORDS.search(path.read_text(encoding="utf-8")):
            continue
        for kind, line in Module(path).findings():
            found[kind].append(f"{name}:{line}")
    assert not any(found.values()), "\n".join(f"{kind}: {' '.join(places)}" for kind, places in found.items())


SAMPLE = """
import time, trio

async def helper(seconds):
    await trio.sleep(seconds)

async def test_mocked(autojump_clock):
    await helper(1)
    began = trio.current_time()
    await trio.sleep(2)
    assert trio.current_time() - began < 3

async def test_real():
    await trio.sleep(0.1)
    began = time.monotonic()
    while time.monotonic() < began + 50:
        await trio.sleep(0.01)
    # clock: any pause will do
    await trio.sleep(0.1)
    took = time.monotonic() - began
    assert took >= 0.1
    assert 0.1 <= took < 5
    with trio.fail_after(2), trio.fail_after(60):
        await trio.sleep(1000)

@pytest.mark.alone
def test_alone():
    time.sleep(1)
"""


def test_real_clocks_are_found(tmp_path: Path) -> None:
    path = tmp_path / "test_sample.py"
    path.write_text(SAMPLE)
    found = [(kind, SAMPLE.splitlines()[line - 1].strip()) for kind, line in Module(path).findings()]
    assert sorted(found) == [
        ("bound", "assert 0.1 <= took < 5"),
        ("limit", "with trio.fail_after(2), trio.fail_after(60):"),
        ("sleep", "await trio.sleep(0.1)"),
    ]
