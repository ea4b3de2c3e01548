"""Kernels that lose the context, and concurrent ones: through a worker, with and without a retry."""

from __future__ import annotations

import numpy as np
import pytest
import trio
from chosen import BACKEND
from own_kernels import AXPY, combine, one, saxpy

import trio_accel as ta
from trio_accel import jit
from trio_accel.testing import inject_fault

pytestmark = pytest.mark.one_backend

isolated = pytest.mark.parametrize("isolation", ["process"])


async def test_an_injected_fault_hits_the_kernel_of_that_name(device: ta.Device) -> None:
    x, y = await device.full(4, 1, "float32"), await device.zeros(4, "float32")
    failure = ta.LibraryError("on purpose", library="jit", code="test")
    inject_fault(device, "jit.saxpy", fail=failure)
    await combine("float32", "float")(1.0, x, x, n=4)
    with pytest.raises(ta.LibraryError, match="on purpose"):
        await saxpy(4, 1.0, x, y)
    await saxpy(4, 1.0, x, await device.zeros(4, "float32"))


async def test_a_lost_launch_is_repeated_if_it_changes_nothing_in_place(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1, retry_suspects=True)
    async with system.open_device(BACKEND, options=options) as device:
        x = np.arange(500, dtype=np.float32)
        refs, sums = await device.put(x), await device.put(x)
        kernel = combine("float32", "float")
        await kernel(1.0, refs, refs, n=500)
        inject_fault(device, "jit.combine<float, 3>", poison=True)
        (out,) = await kernel(2.0, refs, refs, n=500)
        assert device.generation == 2
        np.testing.assert_array_equal(await out.to_host(), 5 * x)
        # A target of additions in place cannot be added to again.
        inject_fault(device, "jit.saxpy", poison=True)
        with pytest.raises(
            ta.ContextLostError, match="make the arrays that it was to change again"
        ) as caught:
            await saxpy(500, 1.0, refs, sums)
        assert caught.value.operation == "jit.saxpy"
        np.testing.assert_array_equal(await refs.to_host(), x)


@isolated
@pytest.mark.skipif(BACKEND != "cuda", reason="runs CUDA code")
async def test_a_kernel_that_writes_out_of_bounds_is_named(device: ta.Device) -> None:
    # The stand-in driver cannot see it by the address, so the name requests the failure.
    name = "fault_illegal_address"
    wild = one(name, f'extern "C" __global__ void {name}(double* x) {{ x[1ll << 42] = 1; }}')
    x = await device.put(np.arange(100, dtype=np.float32))
    y = await device.zeros(100, "float32")
    await saxpy(100, 2.0, x, y)
    with pytest.raises(ta.ContextLostError) as caught:
        await wild(await device.zeros(8))
    assert (caught.value.operation, caught.value.generation) == (f"jit.{name}", 1)
    # The next worker compiles it again, and the arrays are unchanged.
    await saxpy(100, 1.0, x, y)
    assert device.generation == 2
    np.testing.assert_array_equal(await y.to_host(), 3 * np.arange(100))


async def test_a_copy_is_updated_in_place_of_an_argument(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1, backoff=ta.Backoff(base=0.0))
    parameters = {
        "n": jit.scalar("int64"),
        "a": jit.scalar("float32"),
        "x": jit.reads("float32", ndim=1),
        "y": jit.updates("float32", ndim=1, copy=True),
    }
    kernel = jit.Kernel("saxpy", AXPY, parameters=parameters, grid=4, block=128, cpu="own_kernels:saxpy_cpu")
    async with system.open_device(BACKEND, options=options) as device:
        numbers = np.arange(500, dtype=np.float32)
        x, y = await device.put(numbers), await device.put(np.repeat(numbers, 2))
        for view in (y[:500], y[::2]):
            # A lost launch has made all its outputs.
            inject_fault(device, "jit.saxpy", kill=True)
            (made,) = await kernel(500, 2.0, x, view)
            np.testing.assert_array_equal(await made.to_host(), 2 * numbers + await view.to_host())
            np.testing.assert_array_equal(await y.to_host(), np.repeat(numbers, 2))
        (host,) = await kernel(500, 2.0, x, numbers)
        np.testing.assert_array_equal(await host.to_host(), 3 * numbers)

        async def twice(x: ta.AccelRef, y: ta.AccelRef) -> ta.AccelRef:
            (once,) = await kernel(500, 1.0, x, y)
            return (await kernel(500, 1.0, x, once))[0]

        graph = await ta.graphs.capture(device, twice, x, x)
        np.testing.assert_array_equal(await (await graph(x, x)).to_host(), 3 * numbers)
        assert device.generation == 3


async def test_launches_keep_the_order_of_their_arrays(device: ta.Device) -> None:
    rng = np.random.default_rng(1)
    held = [rng.integers(-3, 4, 64).astype(np.float32) for _ in range(4)]
    refs = [await device.put(each) for each in held]
    model = [each.astype(float) for each in held]
    pending = []
    for step in range(60):
        source, target = rng.choice(4, 2, replace=False)
        factor = float(rng.choice([-1.0, 0.5, 1.0]))
        if step % 3:
            message = saxpy.launch(64, factor, refs[source], refs[target])
            pending.append(device.submit(message).wait)
        else:
            pending.append(device.submit(ta.linalg.Axpy(factor, refs[source], refs[target])).wait)
        model[target] += factor * model[source]
    async with trio.open_nursery() as nursery:
        for wait in pending:
            nursery.start_soon(wait)
    for ref, right in zip(refs, model, strict=True):
        np.testing.assert_allclose(await ref.to_host(), right, rtol=1e-5, atol=1e-5 * np.abs(right).max())


@pytest.mark.skipif(BACKEND != "cpu", reason="calls functions of Python")
async def test_a_function_that_numba_has_compiled(device: ta.Device) -> None:
    pytest.importorskip("numba")
    from trio_accel import jit

    kernel = jit.Kernel(
        "saxpy",
        saxpy.definition.code[0],
        parameters={
            "n": jit.scalar("int64"),
            "a": jit.scalar("float32"),
            "x": jit.reads("float32"),
            "y": jit.updates("float32"),
        },
        grid=1,
        block=32,
        cpu="numba_kernels:saxpy",
    )
    x = np.arange(50, dtype=np.float32)
    y = await device.put(x)
    await kernel(50, 2.0, await device.put(x), y)
    np.testing.assert_array_equal(await y.to_host(), 3 * x)


async def test_a_lost_expression_is_computed_again_unless_it_works_in_place(
    system: ta.System,
) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1, retry_suspects=True)
    async with system.open_device(BACKEND, options=options) as device:
        x = np.arange(500.0)
        ref = await device.put(x)
        double, total = ta.jit.elementwise("2 * x", name="double"), ta.jit.reduction("x", name="total")
        inject_fault(device, "jit.double", poison=True)
        np.testing.assert_array_equal(await (await double(ref)).to_host(), 2 * x)
        inject_fault(device, "jit.total", poison=True)
        assert await (await total(ref)).to_host() == x.sum()
        assert device.generation == 3
        inject_fault(device, "jit.double", poison=True)
        with pytest.raises(ta.ContextLostError, match="make the arrays that it was to change again"):
            await double(ref, out=ref)
