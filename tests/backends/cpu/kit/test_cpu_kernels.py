"""What the CPU backend makes of a kernel: work for its stream, status words, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from own_modules import Every, Moved, install

from trio_accel.backends.base import LibraryError, OutOfMemoryError
from trio_accel.backends.base.kernels import kernel


@pytest.fixture(autouse=True)
def _only_cpu(backend: Any) -> None:
    if backend.name != "cpu":
        pytest.skip("of what only the CPU backend has")


@kernel(Every, backend="cpu")
def every(spec: Every, memory: Any) -> Callable[[], None]:
    """See `Every`."""
    terms, out = [memory.view(term) for term in spec.terms], memory.view(spec.out)
    bias = None if spec.bias is None else memory.view(spec.bias)

    def work() -> None:
        for row, term in zip(out, terms, strict=False):
            np.multiply(term, spec.factor, out=row)
        if bias is not None:
            out[-1] = bias
        spec.made[:] = len(out), spec.fails

    return work


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
    texts = [str(event.error or "").partition(" [")[0] for event in events]
    assert texts == ["", "row 3 is bad", "", "row 4 is bad"]
    assert [spec.made.tolist() for spec in specs] == [[1, code] for code in fails]
    assert rig.stream.failure is None


def moved(rig: Any, monkeypatch: pytest.MonkeyPatch, function: Callable[[], Any]) -> Callable[[], None]:
    """Runs an operation whose kernel only calls a function."""
    declared = kernel(Moved, backend="cpu")(lambda spec, memory: function())
    name = install(monkeypatch, declared=declared)
    array = rig.put(np.arange(4.0))
    return lambda: rig.apply(name, Moved(array, array, ""))


@pytest.mark.parametrize("returned", [None, 5, "work"])
def test_a_kernel_that_returns_no_work(rig: Any, monkeypatch: pytest.MonkeyPatch, returned: Any) -> None:
    run = moved(rig, monkeypatch, lambda: returned)
    text = rf"must return its work, a callable without arguments, got {type(returned).__name__}"
    with pytest.raises(TypeError, match=text):
        run()
    assert rig.stream.failure is None


@pytest.mark.parametrize("where", ["kernel", "work"])
def test_a_kernel_that_raises(rig: Any, monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    for error in (RuntimeError("broken"), LibraryError("refused", library="own", code="own")):

        def fail(error: Exception = error) -> Any:
            raise error

        run = moved(rig, monkeypatch, fail if where == "kernel" else lambda fail=fail: fail)
        with pytest.raises(type(error)) as caught:
            run()
        assert caught.value is error
    if where == "kernel":
        assert getattr(error, "device", None) == "cpu:0"
    assert rig.stream.failure is None


def test_work_that_needs_more_memory_than_there_is(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = moved(rig, monkeypatch, lambda: lambda: np.empty(1 << 60, np.uint8))
    with pytest.raises(OutOfMemoryError) as caught:
        run()
    assert (caught.value.requested, caught.value.device) == (1 << 60, "cpu:0")


def test_work_runs_in_the_streams_thread(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[int] = []

    def prepare() -> Callable[[], None]:
        threads.append(threading.get_ident())
        return lambda: threads.append(threading.get_ident())

    moved(rig, monkeypatch, prepare)()
    here, there = threads
    assert here == threading.get_ident() != there


def test_nothing_is_planned(rig: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    library = rig.library(install(monkeypatch, every=every))
    assert library.operations == {Every}
    assert (
        library.prepare(Every((), None, rig.empty((0, 4), "float64"), 0, 1.0, np.zeros(2, np.int32))) is None
    )
