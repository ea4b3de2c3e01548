"""The CPU backend's call of a kernel: in the thread of a stream, with status words, and reported errors."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from own_modules import Every, Moved, install

from trio_accel.backends.base import KernelCall, LibraryError, NotSupportedError, OutOfMemoryError
from trio_accel.backends.base.kit.kernels import kernel

pytestmark = [pytest.mark.no_device, pytest.mark.machine]


@pytest.fixture(autouse=True)
def _only_cpu(backend: Any) -> None:
    if backend.name != "cpu":
        pytest.skip("of what only the CPU backend has")


@kernel(Every, backend="cpu")
def every(spec: Every, call: KernelCall) -> None:
    """See `Every`."""
    out = call.array(spec.out)
    for row, term in zip(out, spec.terms, strict=False):
        np.multiply(call.array(term), spec.factor, out=row)
    if spec.bias is not None:
        out[-1] = call.array(spec.bias)
    spec.made[:] = len(out), spec.fails


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("count", [0, 1, 5])
def test_each_role(rig: Any, monkeypatch: pytest.MonkeyPatch, count: int, has_bias: bool) -> None:
    rows = count + has_bias
    hosts = [np.arange(4.0) + number for number in range(count)]
    bias = rig.put(np.full(4, -1.0)) if has_bias else None
    out, made = rig.empty((rows, 4), "float64"), np.full(2, 99, np.int32)
    rig.apply(install(monkeypatch, every=every), Every(tuple(map(rig.put, hosts)), bias, out, 0, 2.0, made))
    expected = [2.0 * host for host in hosts] + [np.full(4, -1.0)] * has_bias
    np.testing.assert_array_equal(rig.get(out), np.reshape(expected, (rows, 4)))
    assert made.tolist() == [rows, 0]


def test_status_words_belong_to_their_operation(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name, term = install(monkeypatch, every=every), rig.put(np.ones(4))
    fails = (0, 3, 0, 4)
    specs = [
        Every((term,), None, rig.empty((1, 4), "float64"), code, 1.0, np.zeros(2, np.int32)) for code in fails
    ]
    hold, events = rig.stream.hold(), []
    for spec in specs:
        rig.enqueue(name, spec)
        events.append(rig.stream.record())
    assert [spec.made.tolist() for spec in specs] == [[0, 0]] * 4
    hold.release()
    rig.stream.synchronize()
    texts = [str(event.error or "").partition(" (")[0] for event in events]
    assert texts == ["", "row 3 is bad", "", "row 4 is bad"]
    assert [spec.made.tolist() for spec in specs] == [[1, code] for code in fails]
    assert rig.stream.failure is None


def moved(
    rig: Any,
    monkeypatch: pytest.MonkeyPatch,
    function: Callable[[Any], Any],
    plan: Callable[[Any, Any], Any] | None = None,
) -> Callable[[], None]:
    """Runs an operation with a kernel that only calls a function."""
    declared = kernel(Moved, backend="cpu", plan=plan)(lambda spec, call: function(call))
    name = install(monkeypatch, declared=declared)
    array = rig.put(np.arange(4.0))
    return lambda: rig.apply(name, Moved(array, array, ""))


@pytest.mark.parametrize("returned", [5, "work", lambda: None])
def test_a_kernel_that_returns_something(rig: Any, monkeypatch: pytest.MonkeyPatch, returned: Any) -> None:
    """For example a kernel written to return its work, which would never run."""
    run = moved(rig, monkeypatch, lambda _: returned)
    text = rf"must compute and return None, it returned {type(returned).__name__}"
    with pytest.raises(TypeError, match=text):
        run()
    assert rig.stream.failure is None


@pytest.mark.parametrize("where", ["plan", "kernel"])
def test_a_kernel_that_raises(rig: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    for error in (RuntimeError("broken"), LibraryError("refused", library="own", code="own")):

        def fail(*_: Any, error: Exception = error) -> Any:
            raise error

        run = moved(rig, monkeypatch, fail, fail if where == "plan" else None)
        with pytest.raises(type(error)) as caught:
            run()
        assert caught.value is error
        if isinstance(error, LibraryError):
            assert error.device == "cpu:0"
    assert rig.stream.failure is None


def test_a_refused_plan_is_not_enqueued(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[Any] = []

    def refuse(spec: Moved, device: Any) -> None:
        assert device is rig.device
        raise NotSupportedError("refused")

    declared = kernel(Moved, backend="cpu", plan=refuse)(lambda spec, call: ran.append(spec))
    name, array = install(monkeypatch, declared=declared), rig.put(np.arange(4.0))
    with pytest.raises(NotSupportedError, match="refused"):
        rig.enqueue(name, Moved(array, array, ""))
    rig.finish(rig.stream)
    assert ran == []


def test_work_that_needs_more_memory_than_there_is(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for take in (lambda call: np.empty(1 << 60, np.uint8), lambda call: call.workspace(1 << 60)):
        run = moved(rig, monkeypatch, lambda call, take=take: take(call) and None)
        with pytest.raises(OutOfMemoryError) as caught:
            run()
        assert (caught.value.requested, caught.value.device) == (1 << 60, "cpu:0")


def test_a_kernel_runs_in_the_streams_thread(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def note(*_: Any) -> None:
        threads.append(threading.get_ident())

    moved(rig, monkeypatch, note, note)()
    here, there = threads
    assert here == threading.get_ident() != there


def test_a_call_by_addresses(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of another language wants addresses of arrays, work memory and status words."""

    @kernel(Every, backend="cpu")
    def by_address(spec: Every, call: KernelCall) -> None:
        (term,), room = spec.terms, call.workspace(32)
        assert (call.device, call.stream, call.plan, call.workspace(0)) == (rig.device, rig.stream, None, 0)
        ctypes.memmove(room, call.address_of(term), 32)
        ctypes.memmove(call.address_of(spec.out), room, 32)
        words = ctypes.cast(call.status(spec.made), ctypes.POINTER(ctypes.c_int32))
        assert (words[0], words[1]) == (0, 0)
        words[0] = 1

    out, made = rig.empty((1, 4), "float64"), np.full(2, 99, np.int32)
    rig.apply(
        install(monkeypatch, by_address=by_address),
        Every((rig.put(np.arange(4.0)),), None, out, 0, 1.0, made),
    )
    assert rig.get(out).tolist() == [[0.0, 1.0, 2.0, 3.0]]
    assert made.tolist() == [1, 0]


def test_nothing_is_planned(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = rig.library(install(monkeypatch, every=every))
    assert library.operations == {Every.operation}
    assert (
        library.prepare(Every((), None, rig.empty((0, 4), "float64"), 0, 1.0, np.zeros(2, np.int32))) is None
    )
