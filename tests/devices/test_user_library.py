"""Operations and library actors of one's own, found by their import path."""

from __future__ import annotations

import sys
import types
from typing import ClassVar

import attrs
import numpy as np
import pytest
from chosen import BACKEND, NAME
from isolations import inline, isolated

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base.contract.ops import MatmulSpec
from trio_accel.devices import LibraryActor, Operand, Operation, Planned, Planner, operation_name


class MyActor(LibraryActor):
    """Serves BLAS operations of one's own, on a stream of its own."""

    library = "blas"


class NoSuchLibrary(LibraryActor):
    library = "abacus"


class NoLibrary:
    pass


@attrs.frozen(eq=False)
class Negate(Operation[MyActor, ta.AccelRef]):
    """``x = -x`` in place."""

    x: ta.AccelRef
    library: ClassVar[str] = f"{__name__}:MyActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        return Planned(linalg.scal.spec(-1.0, planner.update("x", self.x)), self.x)


@attrs.frozen(eq=False)
class Square(Operation[MyActor, ta.AccelRef]):
    """``a @ a``."""

    a: Operand
    library: ClassVar[str] = f"{__name__}:MyActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        a = planner.read("a", self.a)
        if a.ndim != 2 or a.shape[0] != a.shape[1]:
            raise ValueError(f"{planner.name}: a must be square, got shape {a.shape}")
        out = planner.output(a.shape, a.dtype)
        return Planned(MatmulSpec(a, a, out.spec), out)


async def test_it_runs_like_any_other(system: ta.System, device: ta.Device) -> None:
    host = np.array([[1.0, 2.0], [3.0, 4.0]])
    x = await device.put(host)
    assert await device.ask(Negate(x)) is x
    np.testing.assert_array_equal(await x.to_host(), -host)
    np.testing.assert_array_equal(await (await device.ask(Square(host))).to_host(), host @ host)
    with pytest.raises(ValueError, match=r"test_user_library\.Square: a must be square, got shape \(1, 2\)"):
        await device.ask(Square(np.ones((1, 2))))
    node = system.tree().find(f"test/{NAME}/context/{__name__}:MyActor")
    assert (node.actor_class, node.handled) == ("MyActor", 2)


async def test_two_actors_of_one_library_live_side_by_side(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.eye(2))
    await device.ask(Negate(x))
    await ta.linalg.scal(3.0, x)
    np.testing.assert_array_equal(await x.to_host(), -3.0 * np.eye(2))
    actors = {node.name: node.actor_class for node in system.tree().find(f"test/{NAME}/context").children}
    # The device's own actors have their names in any order of first use.
    assert actors == {"memory": "MemoryActor", f"{__name__}:MyActor": "MyActor", "blas": "BlasActor"}
    ta.testing.inject_fault(device, Negate, fail=RuntimeError("broken"))
    with pytest.raises(ta.ActorFailedError):
        await device.ask(Negate(x))
    await ta.linalg.scal(-1.0, x)
    np.testing.assert_array_equal(await x.to_host(), 3.0 * np.eye(2))


def message(path: str) -> Operation[LibraryActor, ta.AccelRef]:
    @attrs.frozen(eq=False)
    class Message(Operation[LibraryActor, ta.AccelRef]):
        library: ClassVar[str] = path

        def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
            out = planner.output((2, 2), ta.DType.float64)
            a = planner.read("a", np.eye(2))
            return Planned(MatmulSpec(a, a, out.spec), out)

    return Message()


NOWHERE: list[tuple[str, type[Exception], str]] = [
    ("__main__:MyActor", ValueError, r"'__main__:MyActor' .* no class of __main__"),
    ("MyActor", ValueError, r"must be an import path 'package\.module:Class'"),
    (f"{__name__}:NoLibrary", TypeError, r"NoLibrary' names no subclass of LibraryActor"),
    (f"{__name__}:Missing", TypeError, r"Missing' names no subclass of LibraryActor"),
    (
        "no_such_module_anywhere:MyActor",
        ModuleNotFoundError,
        r"\.Message: library: 'no_such_module_anywhere:MyActor' cannot be imported: No module",
    ),
    (
        f"{__name__}:NoSuchLibrary",
        ta.NotSupportedError,
        r"has no library 'abacus'; it has arrays, blas, blaslt",
    ),
]


async def test_paths_that_lead_nowhere_cost_nothing(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.ones(2))
    for path, error, text in NOWHERE:
        for _ in range(5):  # more often than a context may crash
            with pytest.raises(error, match=text) as caught:
                await device.ask(message(path))
            if isinstance(caught.value, ta.AccelError):
                operation = operation_name(type(message(path)))
                assert (caught.value.operation, caught.value.device) == (operation, NAME)
                with pytest.raises(error, match=text) as caught:
                    await device.submit(message(path)).wait()
                assert caught.value.operation == operation
        assert device.generation == 1
        assert {node.restarts for node in system.tree().walk()} == {0}
        assert (await x.to_host()).tolist() == [1.0, 1.0]


async def test_a_message_that_names_no_library(device: ta.Device) -> None:
    @attrs.frozen(eq=False)
    class Nameless(Operation[MyActor, ta.AccelRef]):
        def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
            raise AssertionError

    with pytest.raises(TypeError, match=r"Nameless.* library = 'package\.module:Class'"):
        await device.ask(Nameless())


async def test_a_message_without_a_plan(device: ta.Device) -> None:
    @attrs.frozen(eq=False)
    class Planless(Operation[MyActor, ta.AccelRef]):
        library: ClassVar[str] = f"{__name__}:MyActor"

    with pytest.raises(ta.NotSupportedError, match="Planless lowers to no operation specification"):
        await device.ask(Planless())


@inline
async def test_a_library_by_the_path_of_a_module_made_on_the_fly(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("made_on_the_fly")
    module.Actor = type("Actor", (LibraryActor,), {"library": "blas"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_on_the_fly", module)
    ref = await device.ask(message("made_on_the_fly:Actor"))
    np.testing.assert_array_equal(await ref.to_host(), np.eye(2))


@isolated
async def test_a_module_that_the_worker_does_not_find_is_named(
    device: ta.Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = types.ModuleType("made_on_the_fly")
    module.Actor = type("Actor", (LibraryActor,), {"library": "blas"})  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_on_the_fly", module)
    x = await device.put(np.ones(3))
    for _ in range(5):
        with pytest.raises(ModuleNotFoundError, match="made_on_the_fly"):
            await device.ask(message("made_on_the_fly:Actor"))
    assert device.generation == 1
    np.testing.assert_array_equal(await x.to_host(), np.ones(3))


def test_names_of_operations() -> None:
    assert operation_name(ta.linalg.Matmul) == "linalg.Matmul"
    assert operation_name(Negate) == "test_user_library.Negate"
    assert operation_name(type("Mine", (Negate,), {"__module__": "__main__"})) == "__main__.Mine"


async def test_an_option_that_names_no_library(system: ta.System, isolation: ta.Isolation) -> None:
    options = ta.DeviceOptions(isolation=isolation, libraries=("no_such_module_anywhere:MyActor",))
    with pytest.raises(ModuleNotFoundError) as caught:
        await system.open_device(BACKEND, options=options)
    assert str(caught.value) == (
        "DeviceOptions.libraries: library: 'no_such_module_anywhere:MyActor' cannot be imported: "
        "No module named 'no_such_module_anywhere'"
    )


async def test_a_plan_that_returns_nothing(device: ta.Device) -> None:
    @attrs.frozen(eq=False)
    class Planless(Operation[MyActor, ta.AccelRef]):
        library: ClassVar[str] = "trio_accel.linalg:BlasActor"

        def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
            return None  # type: ignore[return-value]  # wrong on purpose

    text = r"\.Planless: plan\(\) must return Planned\(spec, reply\), got NoneType"
    with pytest.raises(TypeError, match=text):
        await device.ask(Planless())
    with pytest.raises(TypeError, match=text):
        device.submit(Planless())
