"""A custom kernel that blocks, on a GPU: the event loop continues, and so does the rest of the GPU."""

from __future__ import annotations

import threading
from collections.abc import Generator
from typing import Any, ClassVar

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND
from isolations import inline

import trio_accel as ta
from trio_accel.backends.base import ops
from trio_accel.backends.base.kit.kernels import kernel
from trio_accel.devices import LibraryActor, Operation, Planned, Planner

pytestmark = pytest.mark.skipif(BACKEND != "cuda", reason="the CPU runs all kernels in threads")

HAS_BEGUN, MAY_GO_ON = threading.Event(), threading.Event()


@ops.specification
class DoubleSpec(ops.OperationSpec):
    """``out = 2 * source``."""

    source: ops.ArraySpec = ops.reads()
    out: ops.ArraySpec = ops.writes()


@kernel(DoubleSpec, backend="cuda", is_blocking=True)
def double(spec: DoubleSpec, call: Any) -> None:
    """Wait in the middle."""
    room = call.room(call.array(spec.out))
    call.convert(call.array(spec.source), room)
    HAS_BEGUN.set()
    assert MAY_GO_ON.wait(20)
    call.convert(room, call.array(spec.out), scale=2.0)


class DoublingActor(LibraryActor):
    """Serves this module."""

    library = __name__


@attrs.frozen(eq=False)
class Doubled(Operation[DoublingActor, ta.AccelRef]):
    """Twice an array, at the test's request."""

    source: ta.AccelRef
    library: ClassVar[str] = f"{__name__}:DoublingActor"

    def plan(self, planner: Planner) -> Planned[ta.AccelRef]:
        source = planner.read("source", self.source)
        out = planner.output(source.shape, source.dtype)
        return Planned(DoubleSpec(source, out.spec), out)


@pytest.fixture(autouse=True)
def _held() -> Generator[None, None, None]:
    HAS_BEGUN.clear()
    MAY_GO_ON.clear()
    yield
    MAY_GO_ON.set()


@inline
async def test_an_event_loop_continues(device: ta.Device) -> None:
    source = await device.put(np.arange(4.0))
    pending = device.submit(Doubled(source))
    again = device.submit(Doubled(pending.value))
    await trio.to_thread.run_sync(HAS_BEGUN.wait)
    for number in range(20):
        assert await (await device.put(np.full(1, float(number)))).item() == number
    assert not pending.is_done
    MAY_GO_ON.set()
    await again.wait()
    np.testing.assert_array_equal(await again.value.to_host(), 4 * np.arange(4.0))


async def test_closing_a_device_keeps_its_memory_in_use(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="inline", close_grace=0.2)
    async with system.open_device(BACKEND, options=options) as device:
        pending = device.submit(Doubled(await device.put(np.arange(4.0))))
        await trio.to_thread.run_sync(HAS_BEGUN.wait)
        opened = device.dispatch.session.engine.device  # type: ignore[union-attr]
        started = trio.current_time()
    # The kernel ends only after this, so the close has not waited for it.
    assert trio.current_time() - started >= 0.2
    with pytest.raises(ta.DeviceLostError):
        await pending.wait()
    MAY_GO_ON.set()
    assert await trio.to_thread.run_sync(opened.close, 20.0)
