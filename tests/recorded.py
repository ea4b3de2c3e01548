"""Records which functions gave right results, by dtype: `pytest --record-operations FILE`.

A function counts for a dtype if a test in one of `FOLDERS` asked for it, copied its result to the host, and
passed. Those tests compare the copy with NumPy, SciPy or a published table. If such a test failed, the
function does not count, whatever other tests say.
"""

from __future__ import annotations

import functools
import inspect
import json
import platform
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from datetime import UTC, datetime
from importlib import import_module, metadata
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import numpy as np
import pytest
from chosen import BACKEND, IS_STAND_IN
from operations_table import CAPABILITIES, public_functions

import trio_accel as ta
from trio_accel.backends import describe, resolve
from trio_accel.backends.base.kit.kernels import KernelEntry, kernels_of
from trio_accel.backends.base.kit.library import LibraryEntry
from trio_accel.devices import Planned

FOLDERS = tuple(CAPABILITIES)
"""Folders of tests, each for the package of its name."""

_PROPERTY = "operations"
# Arguments that choose elements of others, and are of bool.
_CHOOSING = ("condition", "mask")
_DISTRIBUTIONS = ("trio", "numpy", "scipy")
# The specifications planned by the current function.
_planned: ContextVar[set[str] | None] = ContextVar("_planned", default=None)


@attrs.define
class _Asked:
    """The requests of one test, by the blocks of the results."""

    results: WeakKeyDictionary[Any, set[tuple[str, str]]] = attrs.field(factory=WeakKeyDictionary)
    asked: set[tuple[str, str]] = attrs.field(factory=set[tuple[str, str]])
    compared: set[tuple[str, str]] = attrs.field(factory=set[tuple[str, str]])
    specs: defaultdict[str, set[str]] = attrs.field(factory=lambda: defaultdict(set))

    def note(self, function: str, arguments: inspect.BoundArguments, reply: object) -> None:
        others = [one for name, one in arguments.arguments.items() if name not in _CHOOSING]
        given = [one for one in others if _has_dtype(one)]
        found = list(_arrays(reply)) or [one for one in given if isinstance(one, ta.AccelRef)]
        if given or found:
            cell = function, str(ta.DType.of([*given, *found][0].dtype))
            self.asked.add(cell)
            for ref in found:
                self.results.setdefault(ref.block, set()).add(cell)

    def read(self, ref: ta.AccelRef) -> None:
        self.compared |= self.results.get(ref.block, set())


def _has_dtype(value: object) -> bool:
    return hasattr(value, "dtype") and not isinstance(value, (np.generic, ta.DType, type))


def _arrays(reply: object) -> Iterator[ta.AccelRef]:
    if isinstance(reply, ta.AccelRef):
        yield reply
    elif isinstance(reply, tuple):
        for one in reply:
            yield from _arrays(one)
    elif attrs.has(cls := type(reply)):
        for field in attrs.fields(cls):
            yield from _arrays(getattr(reply, field.name))


class OperationRecorder:
    """A plugin of pytest: listens in the processes that run tests, and writes in the first one."""

    def __init__(self, file: Path, *, is_worker: bool) -> None:
        if IS_STAND_IN:
            raise pytest.UsageError("--record-operations: the stand-in is not hardware")
        self._file = file
        self._is_worker = is_worker
        self._now: _Asked | None = None
        self._passed = set[tuple[str, str]]()
        self._failed = set[tuple[str, str]]()
        self._specs = defaultdict[str, set[str]](set)
        self._tests = 0
        for name, (owner, function) in public_functions().items():
            listening = self._listening(name, function)
            setattr(owner, function.__name__, listening)
            if inspect.ismodule(owner):
                # Pickle looks for it there.
                setattr(sys.modules[function.__module__], function.__name__, listening)
        self._listen_to_copies()

    def _listening(self, name: str, function: Any) -> Any:
        """A function of the same signature, which notes the outcome of each call."""
        signature = inspect.signature(function)

        async def ask(arguments: inspect.BoundArguments, unknown: dict[str, Any]) -> Any:
            if unknown:
                # The function itself reports the fault.
                return await function(*arguments.args, **arguments.kwargs, **unknown)
            outer = _planned.get()
            token = _planned.set(specs := set[str]())
            try:
                reply = await function(*arguments.args, **arguments.kwargs)
            finally:
                _planned.reset(token)
            if outer is not None:
                outer |= specs
            if self._now is not None:
                self._now.note(name, arguments, reply)
                self._now.specs[name] |= specs
            return reply

        # A wrong argument is refused by the call itself, and not when the coroutine is awaited.
        names: dict[str, Any] = {"ask": ask, "bind": signature.bind}
        bare = [one.replace(default=one.empty, annotation=one.empty) for one in signature.parameters.values()]
        marks = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
        given = [
            f"{one.name}={one.name}" if one.kind is one.KEYWORD_ONLY else marks.get(one.kind, "") + one.name
            for one in bare
        ]
        unknown = inspect.Parameter("unknown", inspect.Parameter.VAR_KEYWORD)
        takes_any = any(one.kind is one.VAR_KEYWORD for one in bare)
        head = f"async def {function.__name__}{inspect.Signature(bare if takes_any else [*bare, unknown])}"
        rest = {} if takes_any else "unknown"
        exec(f"{head}: return await ask(bind({', '.join(given)}), {rest})", names)
        listening: Any = functools.update_wrapper(names[function.__name__], function)
        # From the signature: only there a function that wraps another has its defaults.
        defaulted = [one for one in signature.parameters.values() if one.default is not one.empty]
        listening.__defaults__ = tuple(one.default for one in defaulted if one.kind is not one.KEYWORD_ONLY)
        named = [one for one in defaulted if one.kind is one.KEYWORD_ONLY]
        listening.__kwdefaults__ = {one.name: one.default for one in named}
        return listening

    def _listen_to_copies(self) -> None:
        to_host, plan = ta.AccelRef.to_host, Planned.__init__

        @functools.wraps(to_host)
        async def read(ref: ta.AccelRef, **options: Any) -> Any:
            values = await to_host(ref, **options)
            if self._now is not None:
                self._now.read(ref)
            return values

        @functools.wraps(plan)
        def note(planned: Planned[Any], spec: Any, *arguments: Any, **more: Any) -> None:
            specs = _planned.get()
            if specs is not None:
                specs.add(spec.operation)
            plan(planned, spec, *arguments, **more)

        setattr(ta.AccelRef, "to_host", read)  # noqa: B010  # neither is meant to be replaced
        setattr(Planned, "__init__", note)  # noqa: B010

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Generator[None, object, object]:
        """Listen while a test runs, and hand on with its report what there was."""
        if item.path.parent.name not in FOLDERS:
            return (yield)
        self._now = now = _Asked()
        try:
            result = yield
        except pytest.skip.Exception:
            raise
        except BaseException:
            item.user_properties.append((_PROPERTY, {"failed": sorted(now.asked)}))
            raise
        finally:
            self._now = None
        specs = {name: sorted(those) for name, those in now.specs.items()}
        item.user_properties.append((_PROPERTY, {"passed": sorted(now.compared), "specs": specs}))
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take up the report of a finished test, whichever process ran it."""
        if report.when != "teardown":
            return
        for name, value in report.user_properties:
            found: Mapping[str, Any] = value if name == _PROPERTY else {}  # type: ignore[assignment]
            passed = {(function, dtype) for function, dtype in found.get("passed", ())}
            self._tests += report.passed and bool(passed)
            self._failed |= {(function, dtype) for function, dtype in found.get("failed", ())}
            self._failed |= set() if report.passed else passed
            self._passed |= passed
            for function, specs in found.get("specs", {}).items():
                self._specs[function].update(specs)

    def pytest_sessionfinish(self) -> None:
        """Write the record, and replace the record of the same backend."""
        if self._is_worker or not self._passed:
            return
        records = json.loads(self._file.read_text(encoding="utf-8")) if self._file.exists() else {}
        records[BACKEND] = self._record()
        text = json.dumps(dict(sorted(records.items())), indent=1)
        self._file.write_text(text + "\n", encoding="utf-8")

    def _record(self) -> dict[str, Any]:
        refused = _refused()
        device = next(one for one in ta.list_devices() if one.backend == BACKEND)
        passed: defaultdict[str, set[str]] = defaultdict(set)
        for function, dtype in self._passed - self._failed:
            passed[function].add(dtype)
        return {
            "date": datetime.now(UTC).date().isoformat(),
            "hardware": f"{device.description}, {device.compute_units} compute units",
            "system": f"{platform.system()} {platform.machine()}",
            "versions": _versions(),
            "tests": self._tests,
            "operations": {
                function: {
                    "passed": _in_order(passed[function]),
                    # A function of several operations may do without the operation that refuses a dtype.
                    "refused": _in_order(
                        {dtype for spec in self._specs[function] for dtype in refused.get(spec, ())}
                        - passed[function]
                    ),
                }
                for function in sorted(passed)
            },
        }


def _in_order(dtypes: set[str]) -> str:
    return " ".join(str(dtype) for dtype in ta.DType if str(dtype) in dtypes)


def _versions() -> dict[str, str]:
    """Versions of Python, of packages, and of the backend's libraries."""
    found = {"Python": platform.python_version()}
    for name in _DISTRIBUTIONS:
        with suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    report = next(one for one in describe() if one.name == BACKEND)
    return found | {one.name: one.version for one in report.software if one.version is not None}


def _refused() -> dict[str, set[str]]:
    """By the names of specifications, the dtypes that the kernels of the backend do not have."""
    refused: dict[str, set[str]] = {}
    for name, kernel in kernels_of_backend().items():
        allowed = next(iter(kernel.dtypes.values()), tuple(ta.DType))
        refused[name] = {str(dtype) for dtype in ta.DType if dtype not in allowed}
    return refused


def kernels_of_backend() -> dict[str, KernelEntry]:
    """Return the kernels of all libraries in the backend, by the names of their operations."""
    package = type(resolve(BACKEND)[0]).__module__.rpartition(".")[0]
    libraries: Mapping[str, LibraryEntry] = import_module(f"{package}.manifest").LIBRARIES
    kernels: dict[str, KernelEntry] = {}
    for entry in libraries.values():
        module = entry.load(package)
        owners = (getattr(module, entry.cls).__mro__ if entry.cls else ()) or (module,)
        for owner in owners:
            kernels |= kernels_of(vars(owner), BACKEND)
    return kernels
