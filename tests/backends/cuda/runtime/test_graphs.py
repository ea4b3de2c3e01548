"""Repeated products are launched as graphs, and nothing else differs by that."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from chosen import IS_STAND_IN
from driver_spy import Calls, Spy

from trio_accel import linalg
from trio_accel.backends.base import DType
from trio_accel.backends.base.contract.ops import CopyFromHostSpec, MatmulSpec

pytestmark = [pytest.mark.no_device, pytest.mark.usefixtures("only_cuda")]


@pytest.fixture
def launches(spy: Spy) -> Calls:
    return spy("cuGraphLaunch")


def numbers(*shape: int, dtype: Any = "float32", seed: int = 0) -> Any:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def product(rig: Any, m: int = 5, k: int = 6, n: int = 7, dtype: Any = "float32") -> MatmulSpec:
    a, b = numbers(m, k, dtype=dtype), numbers(k, n, dtype=dtype, seed=1)
    return MatmulSpec(rig.put(a), rig.put(b), rig.empty((m, n), dtype))


def check(rig: Any, spec: MatmulSpec) -> None:
    a, b = (rig.get(array).astype(np.float64) for array in (spec.a, spec.b))
    np.testing.assert_allclose(rig.get(spec.out), a @ b, rtol=1e-4, atol=1e-4)


def load(rig: Any, spec: MatmulSpec) -> None:
    """The first product of a type waits for everything in flight, because it loads code."""
    prepare = rig.library("blas").prepare(spec)
    if prepare is not None:
        prepare()


def have_captured(rig: Any, spec: MatmulSpec) -> None:
    for _ in range(3):
        rig.apply("blas", spec)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("n", [1, 4, 100])
def test_the_third_is_a_graph_and_has_the_same_bits(
    rig: Any, launches: Calls, random_array: Any, exact: Any, assert_close: Any, dtype: str, n: int
) -> None:
    a, b = (random_array((n, n), dtype, seed) for seed in (0, 1))
    spec = MatmulSpec(rig.put(a), rig.put(b), rig.empty((n, n), a.dtype))
    load(rig, spec)
    results, counts = [], []
    for _ in range(5):
        rig.apply("blas", spec)
        results.append(rig.get(spec.out))
        counts.append(launches.count)
    captured = len(rig.device.graphs)
    # There cuBLAS enqueues what no graph may have, on an H200.
    is_refused = (dtype, n) == ("complex128", 100) and not captured
    assert (counts, captured) == (([0] * 5, 0) if is_refused else ([0, 0, 1, 2, 3], 1))
    assert_close(results[0], exact(a) @ exact(b), n)
    assert all(result.tobytes() == results[0].tobytes() for result in results)


def test_new_numbers_at_the_same_place(rig: Any, launches: Calls) -> None:
    spec = product(rig)
    for seed in range(6):
        rig.enqueue("memory", CopyFromHostSpec(numbers(5, 6, seed=seed), spec.a))
        rig.enqueue("blas", spec)
        check(rig, spec)
    assert launches.count == 4


def test_each_place_of_a_result_has_its_own(rig: Any, launches: Calls) -> None:
    spec = product(rig)
    specs = [attrs.evolve(spec, out=rig.empty((5, 7), "float32")) for _ in range(4)]
    for _ in range(4):
        for each in specs:
            rig.apply("blas", each)
    assert (launches.count, len(rig.device.graphs)) == (8, 4)
    for each in specs:
        check(rig, each)


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("role", ["a", "b", "out"])
def test_memory_outside_the_arrays_is_refused(
    rig: Any, launches: Calls, role: str, is_captured: bool
) -> None:
    """Before anything is enqueued, because nobody would see a kernel's writes outside of its block."""
    spec = product(rig)
    array = getattr(spec, role)
    load(rig, spec)
    if is_captured:
        have_captured(rig, spec)
    before = launches.count
    _, nbytes, _ = rig.device.blocks.blocks[array.block]
    for offset in (-4, nbytes - 4):
        with pytest.raises(
            ValueError, match=f"does not lie within its block of {nbytes} bytes.*{array.block}"
        ):
            rig.apply("blas", attrs.evolve(spec, **{role: attrs.evolve(array, offset=offset)}))
    with pytest.raises(KeyError, match="block 999 does not exist"):
        rig.apply("blas", attrs.evolve(spec, **{role: attrs.evolve(array, block=999)}))
    assert launches.count == before
    rig.apply("blas", spec)
    check(rig, spec)


def test_the_same_place_in_another_layout_is_another_product(rig: Any, launches: Calls) -> None:
    plain = product(rig, 4, 4, 4)
    specs = [
        attrs.evolve(
            plain, a=attrs.evolve(plain.a, strides=strides_a), b=attrs.evolve(plain.b, strides=strides_b)
        )
        for strides_a in ((16, 4), (4, 16))
        for strides_b in ((16, 4), (4, 16))
    ]
    a, b = rig.get(plain.a), rig.get(plain.b)
    for _ in range(4):
        for number, spec in enumerate(specs):
            rig.apply("blas", spec)
            expected = (a.T if number // 2 else a).astype(float) @ (b.T if number % 2 else b)
            np.testing.assert_allclose(rig.get(spec.out), expected, rtol=1e-5, atol=1e-5)
    assert launches.count == 8


def test_each_stream_has_its_own(rig: Any, launches: Calls) -> None:
    other = rig.device.open_stream("other")
    spec = product(rig)
    rig.finish(rig.stream)
    for _ in range(3):
        for stream in (rig.stream, other):
            rig.enqueue("blas", spec, stream)
            rig.finish(stream)
    assert (launches.count, len(rig.device.graphs)) == (2, 2)
    check(rig, spec)


def test_factors_are_part_of_a_product(rig: Any, launches: Calls) -> None:
    a, c = numbers(4, 4), numbers(4, 4, seed=2)
    place, out = rig.put(a), rig.empty((4, 4), "float32")
    factors = [(1.0, 0.0), (2.0, 0.0), (-0.0, 0.0), (0.0, -1.0), (0.5, 3.0)]
    for _ in range(4):
        for alpha, beta in factors:
            rig.enqueue("memory", CopyFromHostSpec(c, out))
            rig.enqueue("blas", linalg.gemm.spec(alpha, place, place, beta, "N", "N", out))
            expected = alpha * (a.astype(float) @ a) + beta * c
            np.testing.assert_allclose(rig.get(out), expected, rtol=1e-5, atol=1e-5)
    with_product = [alpha for alpha, _ in factors if alpha]
    assert (launches.count, len(rig.device.graphs)) == (2 * len(with_product), len(with_product))


@pytest.fixture
def scale(rig: Any) -> Callable[[complex, float], None]:
    """Some products with a factor, always of the same call at the same place."""
    place, out = rig.put(numbers(4, 4)), rig.empty((4, 4), "float32")
    a = rig.get(place).astype(float)

    def products(alpha: complex, beta: float = 0.0) -> None:
        for _ in range(6):
            rig.enqueue("blas", linalg.gemm.spec(alpha, place, place, beta, "N", "N", out))
            rig.finish(rig.stream)
        if not beta:
            np.testing.assert_allclose(rig.get(out), alpha * (a @ a), rtol=1e-5, atol=1e-5)

    return products


@pytest.mark.parametrize("beta", [0.0, -0.0, 0.5])
def test_other_operations_are_not_tried(rig: Any, launches: Calls, spy: Spy, scale: Any, beta: float) -> None:
    """It may be no kernel, and is none that others would have to make way for."""
    rig.library("blas")
    tried = spy("cuStreamBeginCapture")
    for alpha in (0.0, -0.0):
        scale(alpha, beta)
    assert (tried.count, launches.count, len(rig.device.graphs)) == (0, 0, 0)
    scale(1.5)
    assert (tried.count, launches.count) == (1, 4)


def test_refused_factors_leave_others_their_graphs(rig: Any, launches: Calls, spy: Spy, scale: Any) -> None:
    rig.library("blas")
    tried, nodes = spy("cuStreamBeginCapture"), spy("cuGraphGetNodes")
    counts = []
    for alpha in (1.0, 2.0, 3.0, 2.0, 1.0):
        nodes.answer = (0, [], 3) if alpha == 2 else None
        scale(alpha)
        counts.append((tried.count, launches.count))
    assert counts == [(1, 4), (2, 4), (3, 8), (3, 8), (3, 14)]


def test_a_call_refused_with_many_factors_is_not_tried_with_more(
    rig: Any, launches: Calls, spy: Spy, scale: Any
) -> None:
    """A caller with a new factor each time does not pay for each, and only a few are remembered."""
    rig.library("blas")
    scale(1000.0)
    tried, nodes = spy("cuStreamBeginCapture"), spy("cuGraphGetNodes")
    nodes.answer = (0, [], 3)
    before = launches.count
    for _ in range(2):
        for number in range(1, 40):
            scale(float(number))
    assert (tried.count, launches.count) == (16, before)
    # Existing graphs stay.
    scale(1000.0)
    assert launches.count == before + 6


def test_vectors_in_between_have_the_handle_as_they_need_it(rig: Any, launches: Calls) -> None:
    spec = product(rig, 4, 4, 4)
    norm = rig.empty((), "float32")
    for _ in range(4):
        rig.enqueue("blas", linalg.scal.spec(2.0, spec.a))
        rig.enqueue("blas", linalg.nrm2.spec(attrs.evolve(spec.a, shape=(16,), strides=(4,)), norm))
        rig.enqueue("blas", spec)
        check(rig, spec)
        np.testing.assert_allclose(rig.get(norm), np.linalg.norm(rig.get(spec.a)), rtol=1e-5)
    assert launches.count == 2


def test_several_products_or_other_layouts_run_without_a_graph(rig: Any, launches: Calls) -> None:
    whole = product(rig, dtype="int32")
    batched = MatmulSpec(
        rig.put(numbers(3, 2, 2)), rig.put(numbers(3, 2, 2)), rig.empty((3, 2, 2), "float32")
    )
    packed = MatmulSpec(
        rig.put_as_laid_out(numbers(4, 8)[:, ::2]), rig.put(numbers(4, 4)), rig.empty((4, 4), "float32")
    )
    for spec in (whole, batched, packed):
        for _ in range(5):
            rig.apply("blas", spec)
    assert launches.count == 0


@pytest.mark.parametrize(
    ("dtype", "extent"),
    [("float32", 7), ("bfloat16", 7), ("complex128", 7), ("float32", 2048), ("bfloat16", 4096)],
)
def test_the_limit_of_graphs_is_reached_next_to_an_endless_kernel(
    rig: Any, launches: Calls, dtype: str, extent: int
) -> None:
    """The driver waits for it where it has to grow its memory for graphs."""
    if extent > 7 and IS_STAND_IN:
        pytest.skip("the processor would take minutes")
    first = product(rig, extent, extent, extent, DType(dtype).dtype)
    load(rig, first)
    rig.apply("blas", first)
    room = rig.device.graphs.room
    specs = [attrs.evolve(first, out=rig.empty((extent, extent), dtype)) for _ in range(room)]
    other = rig.device.open_stream("other")
    rig.finish(rig.stream)
    hold = rig.device.spin(other)
    helped = threading.Event()
    helper = threading.Timer(10, lambda: (helped.set(), hold.release()))
    helper.start()
    try:
        for _ in range(4):
            for spec in specs:
                rig.enqueue("blas", spec)
        rig.finish(rig.stream)
    finally:
        helper.cancel()
        helper.join()
        hold.release()
    assert not helped.is_set(), "it waited for the kernel"
    assert (room, len(rig.device.graphs), launches.count) == (128, room, 2 * room)
    expected = rig.get(first.out).tobytes()
    assert all(rig.get(spec.out).tobytes() == expected for spec in specs)
    rig.finish(other)


def test_two_open_graphs_do_not_share_memory(open_rig: Any, spy: Spy) -> None:
    made = spy("cuGraphInstantiate")
    with open_rig() as first:
        first.library("blas")
        with open_rig() as second:
            second.library("blas")
            assert made.count == first.device.graphs.room + 2 * second.device.graphs.room
        with open_rig() as third:
            third.library("blas")
            assert made.count == 3 * first.device.graphs.room + 2 * third.device.graphs.room


@pytest.fixture
def few(rig: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Capacity for two, one of which may make way at any time."""
    rig.library("blas")
    captured = rig.device.graphs._captured
    monkeypatch.setattr(captured, "_patience", 1)
    captured.bound = 2
    return rig


def test_an_unused_graph_makes_way(few: Any, launches: Calls) -> None:
    specs = [product(few) for _ in range(6)]
    for spec in specs:
        for _ in range(8):
            few.apply("blas", spec)
            assert len(few.device.graphs) <= 2
        before = launches.count
        few.apply("blas", spec)
        assert launches.count == before + 1
        check(few, spec)


def test_a_graph_in_flight_does_not_make_way(few: Any, spy: Spy) -> None:
    destroyed = spy("cuGraphExecDestroy")
    captured, late = [product(few), product(few)], product(few)
    for spec in captured:
        have_captured(few, spec)
    few.finish(few.stream)
    hold = few.stream.hold()
    for spec in captured:
        few.enqueue("blas", spec)
        few.stream.record()
    for _ in range(10):
        few.enqueue("blas", late)
    assert destroyed.count == 0
    hold.release()
    few.finish(few.stream)
    for _ in range(4):
        few.apply("blas", late)
    assert destroyed.count == 1
    for spec in (*captured, late):
        check(few, spec)


@pytest.mark.parametrize("where", ["cuStreamBeginCapture", "cuStreamEndCapture", "cuGraphInstantiate"])
@pytest.mark.parametrize("code", [801, 2, 900])
def test_products_run_without_a_graph_if_none_can_be_made(
    rig: Any, launches: Calls, spy: Spy, where: str, code: int
) -> None:
    from cuda.bindings import driver

    spec = product(rig)
    rig.apply("blas", spec)
    if where == "cuStreamEndCapture":
        end = driver.cuStreamEndCapture

        def fail(stream: int) -> tuple[Any, ...]:
            driver.cuGraphDestroy(end(stream)[1])
            return driver.CUresult(code), None

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(driver, where, fail)
            have_captured(rig, spec)
        tried = spy(where)
    else:
        tried = spy(where)
        tried.answer = driver.CUresult(code), None
        have_captured(rig, spec)
        tried.answer = None
        assert tried.count == 1
        tried.count = 0
    have_captured(rig, spec)
    assert (tried.count, launches.count) == (0, 0)
    check(rig, spec)
    # Another product is not concerned.
    other = product(rig, 3, 3, 3)
    have_captured(rig, other)
    assert launches.count == 1


def test_products_run_without_a_graph_if_the_library_refuses_to_capture(
    rig: Any, launches: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    from nvmath.bindings import cublas

    spec = product(rig)
    keep_going, calls = cublas.gemm_ex_64, 0

    def fails_once(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise cublas.cuBLASError(14)
        keep_going(*arguments)

    rig.library("blas")
    monkeypatch.setattr(cublas, "gemm_ex_64", fails_once)
    for _ in range(5):
        rig.apply("blas", spec)
        check(rig, spec)
    assert (calls, launches.count) == (6, 0)


def test_setting_memory_may_be_part_of_a_graph(rig: Any, launches: Calls, spy: Spy) -> None:
    """An H200 has it before products of 4096 in short types, which distribute their work by counters."""
    spec = product(rig)
    rig.apply("blas", spec)
    spy("cuGraphNodeGetType").answer = (0, 2)
    have_captured(rig, spec)
    assert launches.count == 2
    check(rig, spec)


@pytest.mark.parametrize(
    ("name", "answer"), [("cuGraphNodeGetType", (0, 1)), ("cuGraphGetNodes", (0, [], 3))]
)
def test_only_a_few_kernels_are_captured(
    rig: Any, launches: Calls, spy: Spy, name: str, answer: tuple[Any, ...]
) -> None:
    """There may be no memory for more, nor for anything else."""
    spec = product(rig)
    rig.apply("blas", spec)
    spy(name).answer = answer
    destroyed = spy("cuGraphDestroy")
    have_captured(rig, spec)
    assert (destroyed.count, launches.count) == (1, 0)
    check(rig, spec)


def test_a_refused_graph_is_given_up(rig: Any, spy: Spy) -> None:
    from cuda.bindings import driver

    spec = product(rig)
    have_captured(rig, spec)
    launches = spy("cuGraphLaunch")
    launches.answer = (driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
    have_captured(rig, spec)
    assert (launches.count, len(rig.device.graphs)) == (1, 0)
    check(rig, spec)


def test_whoever_launches_does_not_wait_for_whoever_clears_up(rig: Any, launches: Calls) -> None:
    spec = product(rig)
    rig.library("blas")
    with rig.device.graphs._lock:
        have_captured(rig, spec)
        assert launches.count == 0
    rig.apply("blas", spec)
    assert launches.count == 1
    check(rig, spec)


def test_a_library_has_its_graphs_destroyed_and_the_next_makes_its_own(rig: Any, spy: Spy) -> None:
    spec = product(rig)
    rig.library("blas").close()
    made, destroyed = spy("cuGraphInstantiate"), spy("cuGraphExecDestroy")
    for number in range(1, 4):
        library = rig.device.open_library("blas")
        for _ in range(4):
            library.enqueue(spec, rig.stream)
        rig.finish(rig.stream)
        check(rig, spec)
        assert (made.count, destroyed.count) == (number, number - 1)
        library.close()
        assert (made.count, destroyed.count, len(rig.device.graphs)) == (number, number, 0)


def test_a_library_closes_while_its_last_products_run(
    few: Any, spy: Spy, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread, as in use: cuBLAS waits for the work before it gives its memory back."""
    spec, other = product(few), product(few)
    library, graphs = few.device.open_library("blas"), few.device.graphs
    made, destroyed = spy("cuGraphInstantiate"), spy("cuGraphExecDestroy")
    drop, dropped = graphs.drop, threading.Event()

    def drop_and_tell(owner: object) -> None:
        drop(owner)
        dropped.set()

    monkeypatch.setattr(graphs, "drop", drop_and_tell)
    few.finish(few.stream)
    hold = few.stream.hold()
    closing = threading.Thread(target=library.close, name="closes the library")
    try:
        for _ in range(3):
            for each in (spec, other):
                library.enqueue(each, few.stream)
                few.stream.record()
        closing.start()
        assert dropped.wait(10)
        assert (made.count, destroyed.count) == (2, 0)
    finally:
        hold.release()
        if closing.ident is not None:
            closing.join(10)
    assert not closing.is_alive()
    few.finish(few.stream)
    check(few, spec)
    for _ in range(6):
        few.apply("blas", spec)
    check(few, spec)
    assert (made.count, destroyed.count, len(few.device.graphs)) == (3, 1, 2)


def test_memory_is_made_once_and_all_is_gone_in_the_end(open_rig: Any, spy: Spy) -> None:
    made, destroyed = spy("cuGraphInstantiate"), spy("cuGraphExecDestroy")
    with open_rig() as rig:
        library = rig.device.open_library("blas")
        before = made.count
        rig.device.open_library("blas").close()
        assert made.count == before
        spec = product(rig)
        for _ in range(3):
            library.enqueue(spec, rig.stream)
        rig.finish(rig.stream)
        assert made.count == destroyed.count + 1
    assert made.count == destroyed.count


@pytest.mark.parametrize("where", ["cuStreamBeginCapture", "cuGraphInstantiate"])
def test_a_driver_that_makes_no_graphs(open_rig: Any, launches: Calls, spy: Spy, where: str) -> None:
    from cuda.bindings import driver

    spy(where).answer = driver.CUresult.CUDA_ERROR_NOT_SUPPORTED, None
    with open_rig() as rig:
        spec = product(rig)
        have_captured(rig, spec)
        check(rig, spec)
        assert (rig.device.graphs.room, launches.count) == (0, 0)


SUDDEN_LOSS = """
import ctypes
import numpy as np
from trio_accel.backends import resolve
from trio_accel.backends.base import ContextPoisonedError, DType
from trio_accel.backends.base.contract.ops import ArraySpec, MatmulSpec

device = resolve("cuda")[0].open_device(0, memory_limit=None)
stream, library = device.open_stream("main"), device.open_library("blas")
device.allocate(0, 64)
array = ArraySpec(0, 0, DType.float32, (4, 4), (16, 4))
for _ in range(5):
    library.enqueue(MatmulSpec(array, array, array), stream)
    stream.record()
stream.synchronize()
assert len(device.graphs) == 1
ctypes.CDLL("libcuda.so.1").stand_in_poison(0, 700)
try:
    library.enqueue(MatmulSpec(array, array, array), stream)
except ContextPoisonedError as error:
    print("lost", device.is_dead)
library.close()
print("closed", device.close(5), len(device.graphs))
"""


def test_a_loss_that_shows_at_a_launch(run_on_stand_in: Callable[..., str]) -> None:
    assert run_on_stand_in(SUDDEN_LOSS).splitlines() == ["lost True", "closed True 0"]
