"""Plans are made before an operation is enqueued, cached, and given back when nothing runs them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from trio_accel.backends.base import LibraryError, NotSupportedError, OutOfMemoryError
from trio_accel.backends.base.ops import FftSpec

pytestmark = pytest.mark.usefixtures("only_cuda")

cufft = pytest.importorskip("nvmath.bindings.cufft")

_MOST = 64


def transform(rig: Any, n: int, dtype: str = "complex64", axes: tuple[int, ...] = (0,)) -> FftSpec:
    shape = (n,) * len(axes)
    source = np.arange(n ** len(axes)).reshape(shape).astype(dtype)
    return FftSpec("c2c", "forward", shape, axes, "backward", rig.put(source), rig.empty(shape, dtype))


def check(rig: Any, spec: FftSpec) -> None:
    expected = np.fft.fftn(np.arange(spec.source.size).reshape(spec.source.shape), axes=spec.axes)
    tolerance = 1e-5 * np.abs(expected).max() * np.sqrt(spec.source.size)
    np.testing.assert_allclose(rig.get(spec.out), expected, atol=tolerance)


def in_a_thread(work: Any) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


def count(rig: Any) -> int:
    return len(rig.library("fft")._plans)


def test_a_plan_is_named_once_and_made_in_another_thread(rig: Any) -> None:
    library, spec = rig.library("fft"), transform(rig, 30)
    assert count(rig) == 0
    plan = library.prepare(spec)
    assert plan is not None
    assert count(rig) == 0
    in_a_thread(plan)
    assert count(rig) == 1
    assert library.prepare(spec) is None
    rig.enqueue("fft", spec)
    # Other arrays of the same layout, and the same layout the other way.
    other = transform(rig, 30)
    assert library.prepare(other) is None
    rig.enqueue("fft", other)
    back = FftSpec("c2c", "inverse", (30,), (0,), "forward", other.out, rig.empty((30,), "complex64"))
    in_a_thread(library.prepare(back))
    assert count(rig) == 1
    rig.enqueue("fft", back)
    check(rig, spec)
    check(rig, other)
    np.testing.assert_allclose(rig.get(back.out), 30 * np.arange(30), atol=1e-2)


@pytest.mark.parametrize(
    ("lengths", "dtype", "error"), [((0,), "complex64", LibraryError), ((4,), "float16", NotSupportedError)]
)
def test_what_cannot_be_planned_is_refused_by_the_plan(
    rig: Any, lengths: tuple[int, ...], dtype: str, error: type[Exception]
) -> None:
    array = rig.put(np.zeros(4, dtype))
    spec = FftSpec("c2c", "forward", lengths, (0,), "backward", array, rig.empty((4,), dtype))
    for _ in range(2):
        with pytest.raises(error) as caught:
            rig.library("fft").prepare(spec)()
        assert caught.value.device == rig.device.info.name  # type: ignore[attr-defined]


def test_so_many_are_cached_and_no_more(rig: Any) -> None:
    specs = [transform(rig, n) for n in range(2, _MOST + 12)]
    for spec in specs:
        rig.apply("fft", spec)
        assert count(rig) <= _MOST
    assert count(rig) == _MOST
    library = rig.library("fft")
    assert library.prepare(specs[-1]) is None
    assert library.prepare(specs[0]) is not None  # the one that was used longest ago
    rig.enqueue("fft", specs[0])
    for spec in specs:
        check(rig, spec)


def test_one_that_may_still_run_is_not_given_back(rig: Any) -> None:
    """Though cuFFT waits for everything when it makes a plan, as far as that was seen."""
    specs = [transform(rig, n) for n in range(2, _MOST + 2)]
    for spec in specs:
        rig.apply("fft", spec)
    oldest = next(iter(rig.library("fft")._plans._made))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(oldest), "is_busy", property(lambda plan: plan is oldest))
        rig.apply("fft", transform(rig, 200))
        assert oldest.handle is not None
        assert count(rig) == _MOST
        patch.setattr(type(oldest), "is_busy", True)
        rig.apply("fft", transform(rig, 201))
        assert count(rig) == _MOST + 1
    rig.apply("fft", transform(rig, 202))
    assert (count(rig), oldest.handle) == (_MOST, None)
    for spec in specs:
        check(rig, spec)


def test_an_operation_of_several_plans_keeps_them_all(rig: Any) -> None:
    """One of them may be the one that was used longest ago, when another has to be made."""
    lines = FftSpec(
        *("c2c", "forward", (3, 3, 3), (1, 2, 3), "backward"),
        *(rig.put(np.ones((3, 3, 3, 3), "complex64")), rig.empty((3, 3, 3, 3), "complex64")),
    )
    rig.apply("fft", lines)
    for n in range(4, 4 + _MOST - 1):
        rig.apply("fft", transform(rig, n))
    whole = transform(rig, 3, axes=(0, 1, 2, 3))
    rig.enqueue("fft", whole)
    check(rig, whole)
    assert count(rig) == _MOST


def test_streams_have_work_areas_of_their_own(rig: Any) -> None:
    specs = [transform(rig, 97) for _ in range(8)]
    other = rig.device.open_stream("other")
    for number, spec in enumerate(specs):
        rig.finish(rig.stream)  # the source is there
        rig.enqueue("fft", spec, other if number % 2 else rig.stream)
    rig.finish(other)
    for spec in specs:
        check(rig, spec)
    other.close()


def test_its_end_gives_all_plans_back(rig: Any) -> None:
    library = rig.device.open_library("fft")
    for n in (5, 6, 7):
        library.enqueue(transform(rig, n), rig.stream)
    rig.finish(rig.stream)
    library.close()
    assert len(library._plans) == 0


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (cufft.Result.ALLOC_FAILED, OutOfMemoryError, "memory"),
        (cufft.Result.INVALID_SIZE, LibraryError, "fft refused: .*INVALID_SIZE"),
        (cufft.Result.NOT_SUPPORTED, NotSupportedError, "NOT_SUPPORTED"),
        (cufft.Result.INTERNAL_ERROR, cufft.cuFFTError, "INTERNAL_ERROR"),
    ],
)
def test_what_a_plan_fails_with(
    rig: Any, monkeypatch: pytest.MonkeyPatch, status: Any, error: type[Exception], message: str
) -> None:
    made: list[int] = []

    def refuse(plan: int, *_: object) -> int:
        made.append(plan)
        raise cufft.cuFFTError(int(status))

    spec = transform(rig, 30)
    plan = rig.library("fft").prepare(spec)
    with monkeypatch.context() as patch:
        patch.setattr(cufft, "make_plan_many64", refuse)
        with pytest.raises(error, match=message):
            plan()
    for handle in made:
        with pytest.raises(cufft.cuFFTError, match="INVALID_PLAN"):
            cufft.destroy(handle)
    assert count(rig) == 0
    plan()  # once more
    rig.enqueue("fft", spec)
    check(rig, spec)
