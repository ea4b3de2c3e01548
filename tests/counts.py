"""What the project counts about itself: `python tests/counts.py` prints it, with `-v` in detail.

docs/design/counts.md says why, and `test_counts.py` has the bounds.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import FrameType

import attrs
import numpy as np
import trio

import trio_accel as ta

__all__ = [
    "EXECUTED",
    "Lines",
    "code_lines",
    "count_lines",
    "executed_files",
    "package_lines",
    "private_names",
]

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "trio_accel"
EXECUTED = ("matmul", "cholesky", "rfft")

# Packages whose functions compute; the others run the user's own code, or compute nothing.
OTHERS = (
    *("actors", "backends", "cli", "devices", "graphs", "interop", "jit"),
    *("patterns", "programs", "telemetry", "testing", "weights"),
)
OWN_CODE = re.compile(r"/_?(jit|fused|programs?|graphs?|weights|_conditions|foreign)[._]|/memory\.")
SPECIFICATIONS = re.compile(r"backends/base/(ops|declarations|operations)/")
KERNELS = re.compile(r"backends/(cpu|cuda)/(libraries|kernels)/")
SILENT = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT),
    *(tokenize.ENDMARKER, tokenize.ENCODING),
}


@functools.cache  # two counts have most files in common
def code_lines(path: Path) -> int:
    """Count the lines of a file that hold code: no blank lines, no comments, no docstrings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".cu", ".cuh"):
        text = re.sub(r"/\*.*?\*/", lambda found: "\n" * found[0].count("\n"), text, flags=re.DOTALL)
        return sum(bool(re.sub(r"//.*", "", line).strip()) for line in text.splitlines())
    silent: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                silent.update(range(first, last + 1))
            case _:
                pass
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    return len(lines - silent)


def package_lines() -> int:
    """Count the lines of code of the package in Python."""
    return sum(map(code_lines, PACKAGE.rglob("*.py")))


@attrs.frozen
class Lines:
    """Lines of code behind the public functions that compute.

    Attributes:
        by_kind: Lines of capabilities, specifications, and what each backend has for them.
        functions: Public functions, with those of a generator, by package.
    """

    by_kind: Counter[str]
    functions: dict[str, set[str]]

    @property
    def per_function(self) -> float:
        """The lines for each function."""
        return self.by_kind.total() / sum(map(len, self.functions.values()))


def count_lines() -> Lines:
    """Count what stands behind each public function that computes."""
    lines, functions = Counter[str](), dict[str, set[str]]()
    for path in sorted(PACKAGE.rglob("*")):
        name = path.relative_to(PACKAGE).as_posix()
        package = name.partition("/")[0]
        if path.suffix not in (".py", ".pyi", ".cu", ".cuh"):
            continue
        if "/" in name and package not in OTHERS and not OWN_CODE.search(name):
            lines["capabilities"] += code_lines(path)
            if path.suffix == ".py":
                functions.setdefault(package, set()).update(_functions_of(path))
        elif (found := KERNELS.match(name)) and not OWN_CODE.search(name):
            lines["cuda sources" if path.suffix in (".cu", ".cuh") else found[1]] += code_lines(path)
        elif SPECIFICATIONS.match(name) and not OWN_CODE.search(name):
            lines["specifications"] += code_lines(path)
    return Lines(lines, {package: _exported(package, names) for package, names in functions.items()})


def _functions_of(path: Path) -> Iterator[str]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) if not name.startswith("_"):
                yield name
            case ast.ClassDef(name="Generator", body=body):
                methods = [each for each in body if isinstance(each, ast.AsyncFunctionDef)]
                yield from (f"Generator.{each.name}" for each in methods if not each.name.startswith("_"))
            case ast.Assign(targets=[ast.Name(id=name), *_], value=ast.Call()):
                if not name.startswith("_") and name.islower():
                    yield name
            case _:
                pass


def _exported(package: str, names: set[str]) -> set[str]:
    listed: set[str] = set(getattr(import_module(f"{PACKAGE.name}.{package}"), "__all__", ()))
    return {name for name in names if "." in name or name in listed or not listed}


class _Trace:
    """The Python functions of the package that are entered, by file."""

    def __init__(self) -> None:
        self.calls = Counter[str]()
        self.moves = self.folder_moves = 0
        self._last = ""

    def __call__(self, frame: FrameType, event: str, _argument: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(str(PACKAGE)):
            return
        self.calls[name] += 1
        if self._last and self._last != name:
            self.moves += 1
            self.folder_moves += Path(self._last).parent != Path(name).parent
        self._last = name


async def executed_files(isolation: ta.Isolation) -> dict[str, _Trace]:
    """Trace one warm operation of each name, in the application's thread."""
    asks: dict[str, Callable[[], Awaitable[object]]] = {}
    async with ta.open_system("counts") as system:
        device = await system.open_device("cpu", options=ta.DeviceOptions(isolation=isolation))
        a = await device.put(np.random.default_rng(1).standard_normal((64, 64)))
        s = await device.put(np.eye(64) * 3)
        asks["matmul"] = lambda: ta.linalg.matmul(a, a)
        asks["cholesky"] = lambda: ta.linalg.cholesky(s)
        asks["rfft"] = lambda: ta.fft.rfft(a)
        return {name: await _traced(asks[name]) for name in EXECUTED}


async def _traced(ask: Callable[[], Awaitable[object]]) -> _Trace:
    for _ in range(30):
        await ask()
        await trio.sleep(0.002)
    traces: list[_Trace] = []
    # The shortest of five: the loop does other things, too, which are not the operation's.
    for _ in range(5):
        traces.append(trace := _Trace())
        sys.setprofile(trace)
        try:
            await ask()
        finally:
            sys.setprofile(None)
    return min(traces, key=lambda trace: trace.calls.total())


def private_names() -> set[str]:
    """Find the private names of the package that tests import: their own, or from a private module."""
    found: set[str] = set()
    for path in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == PACKAGE.name:
                full = [f"{node.module}.{alias.name}" for alias in node.names]
                found.update(name.rpartition(".")[2] for name in full if re.search(r"\._(?!_)", name))
    return found


def main() -> None:
    """Print all counts."""
    is_long = "-v" in sys.argv[1:]
    for isolation in ("inline", "process"):
        for name, trace in trio.run(executed_files, isolation).items():
            moves = f"{trace.moves} moves between files, {trace.folder_moves} between folders"
            print(f"{isolation} {name}: {len(trace.calls)} files, {trace.calls.total()} calls, {moves}")
            if is_long:
                rows = [f"    {n:3} {Path(file).relative_to(PACKAGE)}" for file, n in trace.calls.items()]
                print("\n".join(rows))
    lines = count_lines()
    print(f"{lines.per_function:.0f} lines per public function: {dict(lines.by_kind)}")
    for package, names in lines.functions.items() if is_long else ():
        print(f"    {package} {len(names)}: {' '.join(sorted(names))}")
    print(f"{package_lines()} lines of code in the package")
    print(f"{len(private_names())} private names that tests import")


if __name__ == "__main__":
    main()
