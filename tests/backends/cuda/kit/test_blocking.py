"""Blocking kernels: their memory is not given back while a thread is in one."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from own_modules import Moved, install

pytest.importorskip("cuda.bindings")

from trio_accel import linalg
from trio_accel.backends.base import ContextPoisonedError, InThread
from trio_accel.backends.base.kit.kernels import kernel, kernels_of
from trio_accel.backends.cuda.kit._library import KernelCall

pytestmark = [pytest.mark.one_backend, pytest.mark.usefixtures("only_cuda")]


@attrs.define(eq=False)
class Blocking:
    """A kernel that waits in its middle until the test lets it continue."""

    has_begun: threading.Event = attrs.field(factory=threading.Event)
    may_go_on: threading.Event = attrs.field(factory=threading.Event)
    plans: list[str] = attrs.field(factory=list)

    def install(self, monkeypatch: pytest.MonkeyPatch, *, has_plan: bool = False) -> str:
        def plan(spec: Moved, device: object) -> str:
            self.plans.append(spec.way)
            return spec.way

        @kernel(Moved, backend="cuda", plan=plan if has_plan else None, is_blocking=True)
        def move(spec: Moved, call: KernelCall) -> None:
            room = call.room(call.array(spec.out))
            call.convert(call.array(spec.source), room)
            self.has_begun.set()
            assert self.may_go_on.wait(20)
            call.convert(room, call.array(spec.out), scale=2.0)
            call.words(1, lambda words: None)

        return install(monkeypatch, move=move)


@attrs.define(eq=False)
class Thread:
    """Calls something in a thread, and keeps what it has raised."""

    function: Callable[[], object]
    error: Exception | None = None
    thread: threading.Thread = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.function()
        except Exception as error:  # noqa: BLE001  # looked at by the test
            self.error = error

    def join(self) -> None:
        self.thread.join(20)
        assert not self.thread.is_alive()


def test_it_reports_that_it_blocks(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    blocking = Blocking()
    blocking.may_go_on.set()
    spec = Moved(rig.put(np.arange(4.0)), rig.empty((4,), "float64"), "one")
    plain = rig.library(blocking.install(monkeypatch))
    assert plain.prepare(spec) == InThread()
    planned = rig.library(blocking.install(monkeypatch, has_plan=True))
    prepare = planned.prepare(spec)
    assert isinstance(prepare, InThread)
    prepare()
    assert (planned.prepare(spec), blocking.plans) == (InThread(), ["one"])
    for library in (plain, planned):
        rig.apply(library.name, spec)
        np.testing.assert_array_equal(rig.get(spec.out), 2 * np.arange(4.0))
    assert blocking.plans == ["one"]


def test_iterations_of_the_solvers_block() -> None:
    pytest.importorskip("nvmath.bindings")
    from trio_accel.backends.cuda.libraries.solver import SolverLibrary

    kernels = kernels_of(vars(SolverLibrary), "cuda")
    assert {spec for spec, one in kernels.items() if one.is_blocking} == {
        linalg.svd.spec.operation,
        linalg.eig.spec.operation,
        linalg.eigh.spec.operation,
        linalg.eigvals.spec.operation,
        linalg.eigvalsh.spec.operation,
    }


def test_closing_a_device_leaves_a_stream_with_an_enqueue_in_progress(
    backend: Any, rig: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocking = Blocking()
    own = type(rig)(device := backend.open_device(0, memory_limit=None), device.open_stream("main"))
    library = own.library(blocking.install(monkeypatch))
    spec = Moved(own.put(np.arange(4.0)), own.empty((4,), "float64"), "")
    own.stream.synchronize()
    thread = Thread(lambda: library.enqueue(spec, own.stream))
    assert blocking.has_begun.wait(20)
    assert not device.close(0.05)
    assert (own.stream.is_closed, own.stream.is_destroyed, own.stream.has_ended) == (True, False, False)
    blocking.may_go_on.set()
    thread.join()
    assert thread.error is None  # its stream was there to the end
    own.stream.synchronize()
    own.close_libraries()
    own.free_all()
    assert device.close(20)
    assert own.stream.is_destroyed
    with pytest.raises(RuntimeError, match="is closed"):
        library.enqueue(spec, own.stream)


def test_a_context_is_lost_meanwhile(backend: Any, rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    blocking = Blocking()
    own = type(rig)(device := backend.open_device(0, memory_limit=None), device.open_stream("main"))
    library = own.library(blocking.install(monkeypatch))
    spec = Moved(own.put(np.arange(4.0)), own.empty((4,), "float64"), "")
    own.stream.synchronize()
    thread = Thread(lambda: library.enqueue(spec, own.stream))
    assert blocking.has_begun.wait(20)
    device.context.lose("for the test")
    blocking.may_go_on.set()
    thread.join()
    with pytest.raises(ContextPoisonedError, match="for the test"):
        library.enqueue(spec, own.stream)
    own.close_libraries()
    own.free_all()
    assert device.close(20)
