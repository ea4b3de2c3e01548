"""Imports point downwards only.

The order is written down in `docs/design/architecture.md`. `tests/layers.py` has it as a table, and every
import of the package is held against it: absolute and relative ones, those inside functions, those for type
checkers only (a type that is needed from above is a sign that it belongs below), and `import_module` or
`later` with a literal name.

Within a part the modules have an order too: none imports itself by way of others.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import attrs
import pytest
from layers import DOWNWARDS, PACKAGE, ROOMS, VENDOR_MAY, VENDORS

ROOT = Path(__file__).parents[2] / PACKAGE

# Stand beside the package, and see its public names only; no wheel has them.
BESIDE = ("benchmarks", "examples")
# But benchmarks print as the command line does, and record the sources that compilers get.
BESIDE_TOO = {
    "benchmarks": (
        "trio_accel.cli._app",
        "trio_accel.cli._console",
        "trio_accel.cli._run",
        "trio_accel.backends.base.expressions._source",
        "trio_accel.backends.cpu.compiled._compiler",
        "trio_accel.backends.cpu.compiled._plans",
        "trio_accel.backends.cpu.compiled._text",
    )
}
BELOW = "_names"  # says what of a part is public; all parts have it but those of the top
FACADE = ""  # the package itself; it and the tools for tests see everything below the top
TOOLS = ("testing",)
TOP = ("cli", "interop")  # see public names only: none with an underscore
EXPORTED = ("interop",)  # what of the top is a public name itself

# The folders of a backend, from the driver up: each imports itself and those before it.
BACKEND_FOLDERS = ("runtime", "compiled", "kit", "libraries")

# The program of a worker puts the parts together.
DEVICE_PROGRAM = f"{PACKAGE}.devices.worker._process"

# Foreign threads reach Trio in one module; besides that, only a backend's streams may own threads.
THREADS = re.compile(
    r"trio_accel\.(devices\.base\._bridge|backends\.(?!base\b)\w+\.(runtime\.)?_?\w*streams?)"
)
# And these, for the reason given.
THREADS_TOO = {
    "trio_accel.actors._loop_watch": "the watch over the loop, which nothing in the loop can see held",
    "trio_accel.actors._system_state": "the number of a thread: a Trio run has one; nothing is started",
    "trio_accel.train._torch_parts": "a lock: PyTorch has one generator for the threads of all ranks",
    "trio_accel.replay._recorder": "a lock: a thread writes large contents, and the loop the other entries",
    "trio_accel.backends._plug_ins": "an import that hangs, which the program does not wait for",
    "trio_accel.backends.base.kit.communicators": "locks: waited for in one thread, given up from another",
    "trio_accel.backends.base.gpu.driver": "locks: compiled in a thread, launched from several",
    "trio_accel.backends.base.gpu.device": "copies of pageable memory, which make their caller wait",
    "trio_accel.backends.base.kit.kept_plans": "a lock: the threads of streams share a table",
    "trio_accel.backends.base.kit.memory": "a lock: memory is given out on one thread and closed on another",
    "trio_accel.backends.base.kit.pools": "to unmap may wait for a stream that Trio's thread holds; a lock",
    "trio_accel.backends.base.kit.ranks": "a lock: where stores have no order, it is a barrier",
    "trio_accel.backends.base.kit.modules": "a lock: two libraries may be imported at once, in two threads",
    "trio_accel.backends.cpu.compiled._compiler": "a lock: streams share the compiler",
    "trio_accel.backends.cpu.compiled._plans": "the compiler beside a stream, and shares of a long loop",
    "trio_accel.backends.cpu.runtime.blas_threads": "locks: streams share the threads of a BLAS",
    "trio_accel.backends.cuda.runtime._signals": "the bridge from host functions, and holds of any thread",
    "trio_accel.backends.cuda.runtime._context": "a context is current in a thread, and lost in any",
    "trio_accel.backends.cpu.libraries.sparse": "factors that each stream's thread keeps for itself",
    "trio_accel.backends.cuda.libraries.sparse": "locks: threads of streams share a handle",
    "trio_accel.backends.cuda.runtime._graphs": "locks: launched on one thread, cleared up on another",
    "trio_accel.cluster._nodes": "the end of standard input, which is the program's death, ends all",
    "trio_accel.cluster._ray_nodes": "an actor of Ray's has an event loop; Trio runs beside it",
    "trio_accel.devices.engine._in_place": "the number of a thread: work in place is that of the run's own",
    "trio_accel.devices.worker._process": "the heartbeat: a sign of life must not depend on the loop",
    "trio_accel.devices.launcher._launcher_fork": "a fork that tries whether threads start in it",
    "trio_accel.devices.wire._protocol": "a lock: taken, it is a barrier",
    "trio_accel.interop._blocking": "futures, for which other threads wait until their tasks have ended",
    "trio_accel.interop._blocking_device": "the thread of the Trio run that serves code that blocks",
    "trio_accel.testing._leaks": "the leak check looks at the threads there are, and starts none",
}
THREAD_MODULES = {"threading", "_thread", "concurrent", "multiprocessing", "queue"}


@attrs.frozen
class Module:
    """One module of the package, or a snippet that stands for one."""

    name: str
    source: str
    is_package: bool = False

    @property
    def part(self) -> str:
        """The entry of the table that this module falls under."""
        return part_of(self.name)

    def imports(self) -> tuple[tuple[int, str], ...]:
        """Return the line and the absolute name of everything imported, as deep as it is written."""
        return _imports_of(self)

    def read(self) -> Iterator[tuple[int, str]]:
        """Yield what `imports` returns."""
        for node in ast.walk(ast.parse(self.source)):
            match node:
                case ast.Import(names=names):
                    yield from ((node.lineno, alias.name) for alias in names)
                case ast.ImportFrom(names=names):
                    base = self._absolute(node.module or "", node.level)
                    yield from ((node.lineno, f"{base}.{alias.name}") for alias in names)
                case (
                    ast.Call(func=ast.Name(id="import_module" | "later" | "__import__"))
                    | ast.Call(func=ast.Attribute(attr="import_module"))
                ):
                    if node.args and isinstance(node.args[0], ast.Constant):
                        yield node.lineno, str(node.args[0].value)
                case _:
                    pass

    def _absolute(self, module: str, level: int) -> str:
        if not level:
            return module
        parents = self.name.split(".")
        keep = len(parents) - level + (1 if self.is_package else 0)
        return ".".join([*parents[:keep], *filter(None, [module])])


# Several tests ask, and the package takes seconds to read.
@functools.cache
def _imports_of(module: Module) -> tuple[tuple[int, str], ...]:
    return tuple(module.read())


def part_of(name: str) -> str:
    """Map a dotted name of the package to its part; the package itself is the part ""."""
    first, second, *_ = [*name.removeprefix(PACKAGE).removeprefix(".").split("."), "", ""]
    if first == "backends" and second in ("base", *VENDORS):
        return f"backends.{second}"
    is_module = (ROOT / first).is_dir() or (ROOT / f"{first}.py").is_file()
    return first if is_module else FACADE  # else a name that the package itself exports


def violations(module: Module) -> list[str]:
    """Name every import of the module that the table does not allow."""
    return [
        f"{module.name}:{line} imports {name}: {reason}"
        for line, name in module.imports()
        if (reason := _reason_of(module, name))
    ]


def _reason_of(module: Module, name: str) -> str | None:
    root = name.split(".", maxsplit=1)[0]
    if root in BESIDE:
        return "the package may not import what stands beside it"
    return _reason(module, name) if root == PACKAGE else None


def _reason(module: Module, name: str) -> str | None:
    mine, other = module.part, part_of(name)
    if mine == other:
        return None
    if other in TOP:
        return None if mine == FACADE and other in EXPORTED else "nothing may import the top"
    if mine in TOP:
        private = [word for word in name.split(".") if re.match(r"_(?!_)", word)]
        return f"`{private[0]}` is private" if private else None
    if mine == FACADE or mine in TOOLS:
        return None
    if mine not in DOWNWARDS and mine.removeprefix("backends.") not in VENDORS:
        return f"`{mine}` has no place in the table of this test"
    allowed = (*DOWNWARDS.get(mine, VENDOR_MAY), BELOW)
    return None if other in allowed else f"`{mine}` may import {', '.join(allowed[:-1]) or 'no other part'}"


def circle_among(modules: Iterable[Module]) -> list[str]:
    """Name modules that import one another in turn, the first again at the end; empty if there are none."""
    modules = tuple(modules)
    names = {module.name for module in modules}
    imported = {
        module.name: {_module_of(name, names) for _, name in module.imports()} - {None, module.name}
        for module in modules
    }
    try:
        TopologicalSorter(imported).prepare()
    except CycleError as error:
        circle: list[str] = error.args[1]
        return circle
    return []


def _module_of(name: str, names: set[str]) -> str | None:
    """The module that an imported name is, or is defined in; None if that is none of `names`."""
    while name and name not in names:
        name = name.rpartition(".")[0]
    return name or None


def modules(folder: Path = ROOT) -> list[Module]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        relative = path.relative_to(folder.parent).with_suffix("")
        is_package = relative.name == "__init__"
        parts = relative.parts[:-1] if is_package else relative.parts
        found.append(Module(".".join(parts), path.read_text(encoding="utf-8"), is_package))
    return found


def test_every_part_of_the_package_has_its_place() -> None:
    parts = {module.part for module in modules()}
    assert parts <= {*DOWNWARDS, *(f"backends.{vendor}" for vendor in VENDORS), FACADE, *TOOLS, *TOP}
    assert {"actors", "backends.base", "backends.cpu", "devices", "linalg", "cli", FACADE} <= parts


def test_imports_point_downwards() -> None:
    assert [line for module in modules() for line in violations(module)] == []


def test_no_circles() -> None:
    assert circle_among(modules()) == []


@pytest.mark.parametrize("folder", BESIDE)
def test_code_next_to_the_package_sees_public_names_only(folder: str) -> None:
    private = {
        found[0]: f"{module.name}:{line} imports {name}"
        for module in modules(ROOT.parent / folder)
        for line, name in module.imports()
        if (found := re.match(rf"{PACKAGE}\.(?:.*?\.)??_(?!_)\w+", name))
    }
    allowed = BESIDE_TOO.get(folder, ())
    assert [text for name, text in private.items() if name not in allowed] == []
    assert {*allowed} <= {*private}


def test_folders_of_a_backend_point_downwards() -> None:
    upwards = []
    for module in modules():
        match module.name.split("."):
            case [_, "backends", vendor, folder, *_] if vendor in VENDORS and folder in BACKEND_FOLDERS:
                own = f"{PACKAGE}.backends.{vendor}."
                allowed = BACKEND_FOLDERS[: BACKEND_FOLDERS.index(folder) + 1]
                names = [name for _, name in module.imports() if name.startswith(own)]
                upwards += [f"{module.name} imports {n}" for n in names if n.split(".")[3] not in allowed]
            case _:
                pass
    assert upwards == []


@pytest.mark.parametrize("part", ROOMS)
def test_rooms_import_by_their_table(part: str) -> None:
    rooms = ROOMS[part]
    against = [line for module in modules() for line in against_the_table(module, part)]
    assert against == []
    folders = {path.parent.name for path in (ROOT / part.replace(".", "/")).glob("*/*.py")}
    assert folders == rooms.keys()


def against_the_table(module: Module, part: str) -> list[str]:
    """Name every import of a module in a room that the table of its part does not allow."""
    mine = room_of(module.name, part)
    if not mine or module.name == DEVICE_PROGRAM:
        return []
    allowed = ROOMS[part][mine]
    return [
        f"{module.name}:{line} imports {name}: `{mine}` may import {', '.join(allowed) or 'no room'}"
        for line, name in module.imports()
        if (other := room_of(name, part)) and other not in (mine, *allowed)
    ]


def room_of(name: str, part: str) -> str:
    """The room of a part that a module, or a name in one, lies in; nothing for all others."""
    room = name.removeprefix(f"{PACKAGE}.{part}.").partition(".")[0]
    return room if name.startswith(f"{PACKAGE}.{part}.") and room in ROOMS[part] else ""


def test_there_are_few_rooms_and_arrows() -> None:
    arrows = {part: sum(map(len, rooms.values())) for part, rooms in ROOMS.items()}
    assert {part: len(rooms) for part, rooms in ROOMS.items()} == {"devices": 8, "backends.base": 4}
    assert arrows["devices"] <= 30
    for rooms in ROOMS.values():
        TopologicalSorter(rooms).prepare()  # raises `CycleError`


def test_an_import_against_the_table_is_named() -> None:
    module = Module("trio_accel.devices.wire._channel", "from ..engine import _completer")
    (told,) = against_the_table(module, "devices")
    assert told.endswith(" imports trio_accel.devices.engine._completer: `wire` may import base, operations")


def test_a_circle_is_found() -> None:
    package = Module("trio_accel.actors", "from ._ref import Ref", is_package=True)
    ref = Module("trio_accel.actors._ref", "from . import _cell")
    cell = Module("trio_accel.actors._cell", "def ref():\n    from trio_accel.actors import Ref")
    assert set(circle_among([package, ref, cell])) == {package.name, ref.name, cell.name}
    assert circle_among([package, cell]) == circle_among([ref, cell]) == []


def test_a_circle_of_types_is_found() -> None:
    ref = Module("trio_accel.actors._ref", "from ._cell import Cell")
    cell = Module(
        "trio_accel.actors._cell",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from ._ref import Ref",
    )
    assert set(circle_among([ref, cell])) == {ref.name, cell.name}


def test_only_the_bridge_and_streams_know_threads() -> None:
    owners = {
        module.name: line
        for module in modules()
        for line, name in module.imports()
        if name.split(".")[0] in THREAD_MODULES and not THREADS.fullmatch(module.name)
    }
    assert owners.keys() == THREADS_TOO.keys(), owners


def test_the_package_opens_no_eventfd() -> None:
    """One that a test leaves on a GPU is the driver's: it has one for itself, and two for each context."""
    assert [module.name for module in modules() if "eventfd" in module.source] == []


UPWARDS = {
    "an actor that knows devices": Module("trio_accel.actors._cell", "import trio_accel.devices"),
    "an actor that knows the version": Module("trio_accel.actors._cell", "from trio_accel import _version"),
    "relative": Module("trio_accel.actors._cell", "from ..devices import Device"),
    "relative, from a package": Module("trio_accel.actors", "from ..devices import Device", is_package=True),
    "relative, two up": Module("trio_accel.backends.base.contract.ops.fft", "from ....devices import Device"),
    "the name of a part": Module("trio_accel.devices.engine._engine", "from trio_accel import fft"),
    "the package itself": Module("trio_accel.linalg._actor", "import trio_accel as ta"),
    "inside a function": Module(
        "trio_accel.backends.cpu.library", "def load():\n    from trio_accel.linalg import Matmul"
    ),
    "for type checkers only": Module(
        "trio_accel.devices.engine._engine",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from trio_accel.linalg import Matmul",
    ),
    "by literal name": Module(
        "trio_accel.devices.engine._engine", "import importlib\nimportlib.import_module('trio_accel.linalg')"
    ),
    "a sibling": Module("trio_accel.fft._actor", "from trio_accel.linalg import Matmul"),
    "another backend": Module(
        "trio_accel.backends.cuda.library", "from trio_accel.backends.cpu import CpuDevice"
    ),
    "a backend below its base": Module(
        "trio_accel.backends.base.contract.errors", "from trio_accel.backends import cpu"
    ),
    "a capability that knows one backend": Module("trio_accel.fft", "import trio_accel.backends.cpu"),
    "a private name": Module("trio_accel.cli._info", "from trio_accel.devices.engine._engine import Engine"),
    "the command line": Module("trio_accel.testing._probe", "from trio_accel.cli import main"),
    "the command line, from the facade": Module("trio_accel", "from . import cli", is_package=True),
    "the benchmarks": Module("trio_accel.testing._probe", "from benchmarks import select"),
    "the benchmarks, from the command line": Module("trio_accel.cli._app", "import benchmarks.actors"),
    "the interop": Module("trio_accel.fft._plan", "from trio_accel.interop import scipy_fft"),
}


@pytest.mark.parametrize("module", UPWARDS.values(), ids=UPWARDS.keys())
def test_an_import_that_points_elsewhere_is_found(module: Module) -> None:
    assert len(violations(module)) == 1


DOWN = {
    "one's own part": Module("trio_accel.actors._cell", "from ._mailbox import Mailbox"),
    "one's own part, from the package": Module(
        "trio_accel.actors", "from ._mailbox import Mailbox", is_package=True
    ),
    "a part below": Module(
        "trio_accel.linalg._actor", "from trio_accel.backends.base.contract.ops import MatmulSpec"
    ),
    "relative": Module("trio_accel.linalg._actor", "from ..devices import Device"),
    "a library": Module("trio_accel.actors._cell", "import trio.lowlevel\nfrom os import path"),
    "the public names": Module("trio_accel.cli._info", "import trio_accel as ta\nfrom trio_accel import fft"),
    "private names, from the tools for tests": Module(
        "trio_accel.testing._operations", "from trio_accel.devices.engine._engine import Engine"
    ),
    "the facade": Module("trio_accel", "from .devices._device import Device", is_package=True),
    "the interop, from the facade": Module("trio_accel", "from . import interop", is_package=True),
}


@pytest.mark.parametrize("module", DOWN.values(), ids=DOWN.keys())
def test_an_import_that_points_downwards_is_allowed(module: Module) -> None:
    assert violations(module) == []


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("trio_accel.devices.base._bridge", True),
        ("trio_accel.backends.cpu.runtime._stream", True),
        ("trio_accel.backends.base.streams", False),
        ("trio_accel.backends.cpu.library", False),
        ("trio_accel.devices.engine._engine", False),
    ],
)
def test_modules_that_may_import_threads(name: str, allowed: bool) -> None:
    assert bool(THREADS.fullmatch(name)) is allowed
