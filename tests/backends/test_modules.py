"""A module of kernels, found by its import path: its contents, and the errors of others."""

from __future__ import annotations

import importlib
import textwrap
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chosen import BACKEND
from own_modules import Every, Moved, install

from trio_accel.backends.base import DType, NotSupportedError
from trio_accel.backends.base.contract.ops import CopySpec
from trio_accel.backends.base.kit.kernels import KernelCall, KernelEntry, kernel, kernels_of


def move_cpu(spec: Any, call: KernelCall) -> None:
    """``out = source``."""
    np.copyto(call.array(spec.out), call.array(spec.source))


def move_cuda(spec: Any, call: Any) -> None:
    """``out = source``."""
    call.convert(call.array(spec.source), call.array(spec.out))


def declared(*specs: type[Any]) -> dict[str, Any]:
    """Kernels for all backends."""
    # Each a function of its own, as a function declares its kernels once.
    found: dict[str, Any] = {}
    for spec in specs:
        found[f"{spec.__name__}_cpu"] = kernel(spec, backend="cpu")(partial(move_cpu))
        if BACKEND not in ("cpu", "cuda"):
            found[f"{spec.__name__}_outside"] = kernel(spec, backend=BACKEND)(partial(move_cpu))
        found[f"{spec.__name__}_cuda"] = kernel(spec, backend="cuda")(partial(move_cuda))
    return found


def test_its_kernels_run(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = install(monkeypatch, **declared(Moved, CopySpec))
    library = rig.library(name)
    assert (library.name, library.operations) == (name, {Moved.operation, CopySpec.operation})
    source = rig.put(np.arange(6.0))
    for make in (lambda out: Moved(source, out, ""), lambda out: CopySpec(source, out)):
        out = rig.empty((6,), "float64")
        rig.apply(name, make(out))
        np.testing.assert_array_equal(rig.get(out), np.arange(6.0))


def test_a_specification_without_a_kernel_is_refused(
    rig: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = install(monkeypatch, **declared(CopySpec))
    source, out = rig.put(np.arange(6.0)), rig.empty((6,), "float64")
    with pytest.raises(NotSupportedError, match=f"library '{name}' has no .*Moved") as caught:
        rig.enqueue(name, Moved(source, out, ""))
    assert (caught.value.backend, caught.value.device) == (backend.name, rig.device.info.name)


def test_a_module_without_kernels_for_the_backend(
    rig: Any, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = {"cpu": "cuda"}.get(backend.name, "cpu")
    for names in ({}, {"move": kernel(Moved, backend=other)(lambda spec, call: None)}):
        name = install(monkeypatch, **names)
        with pytest.raises(NotSupportedError) as caught:
            rig.device.open_library(name)
        assert str(caught.value).startswith(
            f"module '{name}' defines no kernels for backend '{backend.name}'; declare them with "
            f'@kernel(Spec, backend="{backend.name}")'
        )
        assert (caught.value.backend, caught.value.device) == (backend.name, rig.device.info.name)


@pytest.mark.parametrize("is_quick", [False, True])
def test_a_plan_that_raises(
    rig: Any, backend: Any, monkeypatch: pytest.MonkeyPatch, *, is_quick: bool
) -> None:
    """It cannot be tried at import: its error names the kernel by file and line."""

    def plan(spec: Any, device: Any) -> Any:
        raise RuntimeError("a plan that is broken")

    @kernel(Moved, backend=backend.name, plan=plan, is_quick=is_quick)
    def move(spec: Any, call: Any) -> None:
        """Is never called."""

    name = install(monkeypatch, move=move)
    library = rig.library(name)
    source, out = rig.put(np.arange(6.0)), rig.empty((6,), "float64")
    spec = Moved(source, out, "")
    prepare = library.prepare(spec)
    assert (prepare is None) is is_quick
    with pytest.raises(RuntimeError, match="a plan that is broken") as caught:
        rig.enqueue(name, spec) if prepare is None else prepare()
    line = move.__code__.co_firstlineno
    assert caught.value.__notes__ == [f"in the plan of the kernel of {Moved.operation} at {__file__}:{line}"]


@pytest.mark.parametrize(
    "name", ["no_such_module_anywhere", "no_such_package.of_kernels", "scipy.no_kernels"]
)
def test_a_module_that_does_not_exist(rig: Any, backend: Any, name: str) -> None:
    with pytest.raises(NotSupportedError, match="there is no module of this name with kernels") as caught:
        rig.device.open_library(name)
    text = f"the {backend.name.upper()} backend has no library '{name}'; it has {rig.device.libraries[0]}, "
    assert str(caught.value).startswith(text)


@pytest.mark.parametrize(
    ("source", "error", "text"),
    [
        ("import no_such_dependency", ModuleNotFoundError, "No module named 'no_such_dependency'"),
        ("from math import no_such_name", ImportError, "cannot import name 'no_such_name'"),
        ("raise RuntimeError('broken')", RuntimeError, "broken"),
    ],
)
def test_a_module_that_cannot_be_imported(
    rig: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, error: type[Exception], text: str
) -> None:
    """The error names the missing dependency instead of the library."""
    (tmp_path / "broken_kernels_of_tests.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for _ in range(2):
        with pytest.raises(error, match=text) as caught:
            rig.device.open_library("broken_kernels_of_tests")
        assert not isinstance(caught.value, NotSupportedError)


def test_two_kernels_for_one_specification(rig: Any, backend: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    def another(*given: Any) -> None:
        """Is never called."""

    name = install(monkeypatch, **declared(Moved), more=kernel(Moved, backend=backend.name)(another))
    first = "move_cuda" if backend.name == "cuda" else "move_cpu"
    text = rf"Moved has two kernels for backend '{backend.name}': .*{first}.* and .*another"
    with pytest.raises(ValueError, match=text):
        rig.device.open_library(name)


def test_one_kernel_by_two_names_and_for_two_specifications() -> None:
    def function(spec: Any, call: KernelCall) -> None:
        """Is never called."""

    for spec in (Moved, Every):
        kernel(spec, backend="cpu")(function)
    kernel(Every, backend="cuda")(function)
    names = {"first": function, "second": function, "other": 5}
    moved, every = Moved.operation, Every.operation
    assert kernels_of(names, "cpu") == {name: KernelEntry(name, "cpu", function) for name in (moved, every)}
    assert kernels_of(names, "cuda") == {every: KernelEntry(every, "cuda", function)}
    assert kernels_of(names, "another") == {}


REFUSED = {
    "two kernels": (
        """
        @kernel(Moved, backend="cpu")
        def _(spec, call): ...
        @kernel(Moved, backend="cpu")
        def _(spec, call): ...
        """,
        ValueError,
        r":4: .*Moved has two kernels for backend 'cpu': _ at .*refused_kernels_of_tests.py:2, and _",
    ),
    "two methods": (
        """
        class Library:
            @kernel(Moved, backend="cpu")
            def one(self, spec, call): ...
            @kernel(Moved, backend="cpu")
            def other(self, spec, call): ...
        """,
        ValueError,
        r":5: .*two kernels for backend 'cpu': Library.one at .*:3, and Library.other",
    ),
    "a kernel of one argument": (
        """
        @kernel(Moved, backend="cpu")
        def lonely(spec): ...
        """,
        TypeError,
        r"refused_kernels_of_tests.py:2: lonely must take \(spec, call\), it takes \(spec\)",
    ),
    "a method without self": (
        """
        class Library:
            @kernel(Moved, backend="cpu")
            def move(spec, call): ...
        """,
        TypeError,
        r":3: Library.move must take \(self, spec, call\), it takes \(spec, call\)",
    ),
    "a plan of one argument": (
        """
        def plan(spec): ...
        @kernel(Moved, backend="cpu", plan=plan)
        def move(spec, call): ...
        """,
        TypeError,
        r":2: plan must take \(spec, device\), it takes \(spec\)",
    ),
    "a plan that cannot be called": (
        """
        @kernel(Moved, backend="cpu", plan="later")
        def move(spec, call): ...
        """,
        TypeError,
        r":2: a function \(spec, device\) is needed, got str",
    ),
    "no dtypes": (
        """
        @kernel(Moved, backend="cpu", dtypes=())
        def move(spec, call): ...
        """,
        ValueError,
        r":2: dtypes: there are none",
    ),
    "no dtype": (
        """
        @kernel(Moved, backend="cpu", dtypes=("float31",))
        def move(spec, call): ...
        """,
        TypeError,
        r":2: dtypes: 'float31' is none of the members of DType",
    ),
    "no such array": (
        """
        @kernel(Moved, backend="cpu", dtypes={"way": (DType.float32,)})
        def move(spec, call): ...
        """,
        ValueError,
        r":2: dtypes: Moved has no array 'way'; it has source, out",
    ),
}


@pytest.mark.parametrize(("source", "error", "text"), REFUSED.values(), ids=REFUSED)
def test_errors_at_import_name_file_and_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, error: type[Exception], text: str
) -> None:
    head = "from own_modules import Moved; from trio_accel.backends.base import DType, kernel"
    path = tmp_path / "refused_kernels_of_tests.py"
    path.write_text(head + textwrap.dedent(source), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(error, match=text):
        importlib.import_module(path.stem)


def test_kernels_of_one_name_are_all_found() -> None:
    names: dict[str, Any] = {}
    source = """
@kernel(Moved, backend="cpu")
def _(spec, call): ...
@kernel("far.away", backend="cpu", dtypes=(DType.int8,))
def _(spec, call): ...
"""
    exec(source, {**globals(), "DType": DType}, names)  # a module, or nearly
    found = kernels_of(names, "cpu")
    assert found.keys() == {Moved.operation, "far.away"}
    assert found["far.away"].dtypes == {"": (DType.int8,)}
