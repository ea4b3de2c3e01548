"""Plans are made before an operation is enqueued, cached, and given back when nothing runs them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from trio_accel.backends.base import LibraryError, NotSupportedError, OutOfMemoryError
from trio_accel.backends.base.contract.ops import FftSpec

pytestmark = [pytest.mark.one_backend, pytest.mark.usefixtures("only_cuda")]

cufft = pytest.importorskip("nvmath.bindings.cufft")

_MOST = 8


@pytest.fixture(autouse=True)
def _few_plans_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from trio_accel.backends.cuda.libraries.fft import FftLibrary

    monkeypatch.setattr(FftLibrary, "most_plans", _MOST)


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
    """How many plans of cuFFT there are."""
    return len(rig.library("fft")._vendor_plans)


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
def test_the_plan_refuses_unsupported_transforms(
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
    assert library.prepare(specs[0]) is not None  # the least recently used one
    rig.enqueue("fft", specs[0])
    for spec in specs:
        check(rig, spec)


def test_a_possibly_running_plan_is_not_given_back(rig: Any) -> None:
    """Though cuFFT waits for everything when it makes a plan, as far as observed."""
    library = rig.library("fft")
    specs = [transform(rig, n) for n in range(2, _MOST + 2)]
    for spec in specs:
        rig.apply("fft", spec)
    oldest = next(iter(library._vendor_plans.values()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(oldest), "is_busy", property(lambda plan: plan is oldest))
        rig.apply("fft", transform(rig, 200))
        assert oldest in library._vendor_plans.values()
        assert count(rig) == _MOST
        patch.setattr(type(oldest), "is_busy", True)
        rig.apply("fft", transform(rig, 201))
        assert count(rig) == _MOST + 1
    rig.apply("fft", transform(rig, 202))
    assert count(rig) == _MOST
    assert oldest not in library._vendor_plans.values()
    for spec in specs:
        check(rig, spec)


def test_a_plan_is_busy_until_its_streams_have_got_past_it(rig: Any) -> None:
    rig.apply("fft", transform(rig, 30))
    (plan,) = rig.library("fft")._vendor_plans.values()
    assert not plan.is_busy
    other = rig.device.open_stream("other")
    spec = transform(rig, 30)
    rig.finish(rig.stream)  # the source is there
    hold = other.hold()
    rig.enqueue("fft", spec, other)
    other.record()
    assert plan.is_busy
    hold.release()
    rig.finish(other)
    assert not plan.is_busy
    other.close()


def test_a_plan_of_cufft_ends_with_the_last_plan_that_executes_it(rig: Any) -> None:
    spec = transform(rig, 30)
    rig.apply("fft", spec)
    for _ in range(2):
        back = FftSpec("c2c", "inverse", (30,), (0,), "forward", spec.out, rig.empty((30,), "complex64"))
        rig.apply("fft", back)
        shared = next(iter(rig.library("fft")._vendor_plans.values()))
        assert (count(rig), shared.users) == (1, 2)
    # The forward plan makes way, then the other one.
    for n in range(2, _MOST + 1):
        rig.apply("fft", transform(rig, n))
    assert (count(rig), shared.users) == (_MOST, 1)
    rig.apply("fft", transform(rig, 50))
    assert (count(rig), shared.users) == (_MOST, 0)
    assert shared not in rig.library("fft")._vendor_plans.values()


def test_an_operation_of_several_plans_keeps_them_all(rig: Any) -> None:
    """The plan replaced by it may share one of them with it."""
    lines = FftSpec(
        *("c2c", "forward", (3, 3, 3), (1, 2, 3), "backward"),
        *(rig.put(np.ones((3, 3, 3, 3), "complex64")), rig.empty((3, 3, 3, 3), "complex64")),
    )
    rig.apply("fft", lines)
    library = rig.library("fft")
    (shared,) = library._vendor_plans.values()
    for n in range(4, 4 + _MOST - 1):
        rig.apply("fft", transform(rig, n))
    whole = transform(rig, 3, axes=(0, 1, 2, 3))
    rig.enqueue("fft", whole)
    assert (len(library._plans), shared.users) == (_MOST, 1)
    assert shared in library._vendor_plans.values()
    check(rig, whole)


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


def halved(rig: Any, n: int) -> FftSpec:
    """A transform to real numbers, of a copy in memory of the library's own."""
    source = rig.put(np.fft.rfft(np.arange(float(n))))
    return FftSpec("c2r", "inverse", (n,), (0,), "backward", source, rig.empty((n,), "float64"))


def test_its_work_area_counts_as_memory_of_the_device(rig: Any) -> None:
    spec = halved(rig, 4096)
    before = rig.device.memory().workspace
    rig.apply("fft", spec)
    assert rig.device.memory().workspace >= before + 2049 * 16
    np.testing.assert_allclose(rig.get(spec.out), np.arange(4096), atol=1e-9)


def test_a_transform_is_refused_if_the_limit_leaves_no_memory(rig: Any, backend: Any) -> None:
    n = 1 << 16
    device = backend.open_device(0, memory_limit=20 * n)
    small = type(rig)(device, device.open_stream("main"))
    spec = halved(small, n)
    for _ in range(2):
        with pytest.raises(OutOfMemoryError):
            small.enqueue("fft", spec)
    small.free(spec.out)
    spec = halved(small, n // 4)
    small.apply("fft", spec)
    np.testing.assert_allclose(small.get(spec.out), np.arange(n // 4), atol=1e-6)
    small.close_libraries()
    small.free_all()
    assert device.close(30)


def test_a_larger_transform_has_the_room_of_the_smaller_one_before_it(rig: Any, backend: Any) -> None:
    """Its work area is one piece: it need not fit next to the stream's memory."""
    first, second = halved(rig, 8192 - 512), halved(rig, 8192)
    needed: list[int] = []
    for spec in (first, second):
        rig.apply("fft", spec)
        needed.append(rig.device.memory().workspace)
    device = backend.open_device(0, memory_limit=rig.device.memory().used + needed[1])
    small = type(rig)(device, device.open_stream("main"))
    for spec in (halved(small, 8192 - 512), halved(small, 8192)):
        small.apply("fft", spec)
        np.testing.assert_allclose(small.get(spec.out), np.arange(float(spec.out.size)), atol=1e-8)
    small.close_libraries()
    small.free_all()
    assert device.close(30)


def test_its_end_gives_all_plans_back(rig: Any) -> None:
    library = rig.device.open_library("fft")
    for n in (5, 6, 7):
        library.enqueue(transform(rig, n), rig.stream)
    rig.finish(rig.stream)
    library.close()
    assert (len(library._plans), library._vendor_plans) == (0, {})


@pytest.mark.parametrize(
    ("status", "error", "message"),
    [
        (cufft.Result.ALLOC_FAILED, OutOfMemoryError, "memory"),
        (cufft.Result.INVALID_SIZE, LibraryError, "fft refused: .*INVALID_SIZE"),
        (cufft.Result.NOT_SUPPORTED, NotSupportedError, "NOT_SUPPORTED"),
        (cufft.Result.INTERNAL_ERROR, cufft.cuFFTError, "INTERNAL_ERROR"),
    ],
)
def test_errors_of_a_plan(
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
