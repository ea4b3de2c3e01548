"""Every operation takes one path: validate, enqueue, complete, reply, release, each once."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

import attrs
import numpy as np
import pytest
import trio
from manual_backend import ManualBackend
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel import linalg
from trio_accel.backends.base.contract.ops import CopyFromHostSpec, MatmulSpec
from trio_accel.devices import Launch, Phase

_refusal = partial(ta.LibraryError, "no", library="blas", code=7)
WHOLE = [Phase.VALIDATE, Phase.ENQUEUE, Phase.COMPLETE, Phase.REPLY, Phase.RELEASE]


@attrs.define(eq=False)
class Recorder:
    """Sees every step of every operation."""

    seen: list[tuple[Phase, str]] = attrs.field(factory=list)

    def __call__(self, phase: Phase, launch: Launch, /) -> None:
        self.seen.append((phase, launch.name))

    def phases(self, name: str) -> list[Phase]:
        return [phase for phase, other in self.seen if other == name]


@pytest.fixture
def recorder(manual: ta.Device) -> Recorder:
    recorder = Recorder()
    manual.state.hooks.append(recorder)
    return recorder


async def test_the_order_of_a_plain_operation(manual: ta.Device, recorder: Recorder) -> None:
    x = await manual.put(np.eye(3))
    await ta.linalg.matmul(x, np.ones((3, 2)))
    assert recorder.phases("devices.Put") == WHOLE
    assert recorder.phases("linalg.Matmul") == WHOLE


async def test_the_reply_follows_completion(
    manual: ta.Device, backend: ManualBackend, recorder: Recorder, nursery: trio.Nursery
) -> None:
    x = await manual.put(np.eye(3))
    replies: list[ta.AccelRef] = []

    async def ask() -> None:
        replies.append(await ta.linalg.matmul(x, x))

    backend.device.is_held = True
    nursery.start_soon(ask)
    await wait_all_tasks_blocked()
    assert recorder.phases("linalg.Matmul") == WHOLE[:2]
    statistics = await manual.statistics()
    assert (statistics.launched, statistics.completed, statistics.in_flight) == (2, 1, 1)
    stream = backend.device.stream("blas")
    assert stream.step()  # the kernel itself
    await wait_all_tasks_blocked()
    assert not replies
    assert stream.step()  # its event
    await wait_all_tasks_blocked()
    assert len(replies) == 1
    assert recorder.phases("linalg.Matmul") == WHOLE
    statistics = await manual.statistics()
    assert (statistics.launched, statistics.completed, statistics.in_flight) == (2, 2, 0)


async def test_a_host_operand_is_staged_and_its_memory_returned(
    manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    x = await manual.put(np.eye(4))
    used = backend.device.memory().used
    replies: list[ta.AccelRef] = []

    async def ask() -> None:
        replies.append(await ta.linalg.matmul(x, np.full((4, 4), 3.0)))

    backend.device.is_held = True
    nursery.start_soon(ask)
    await wait_all_tasks_blocked()
    assert backend.device.memory().used == used + 2 * 128  # the operand's copy and the product
    backend.device.release()
    await wait_all_tasks_blocked()
    await manual.synchronize()
    assert backend.device.memory().used == used + 128
    np.testing.assert_array_equal(await replies[0].to_host(), np.full((4, 4), 3.0))


async def test_memory_is_freed_after_the_reply_and_not_while_work_uses_it(
    manual: ta.Device, backend: ManualBackend, recorder: Recorder, nursery: trio.Nursery
) -> None:
    x = await manual.put(np.eye(3))
    block = x.block.id
    freed_at: list[Phase] = []
    manual.state.hooks.append(
        lambda phase, launch: freed_at.append(phase) if block in backend.device.freed else None
    )
    backend.device.is_held = True
    nursery.start_soon(ta.linalg.scal, 2.0, x)
    await wait_all_tasks_blocked()
    x.release()
    await wait_all_tasks_blocked()
    assert block not in backend.device.freed
    backend.device.release()
    await wait_all_tasks_blocked()
    assert block in backend.device.freed
    assert freed_at == [Phase.RELEASE]


async def test_an_error_on_the_stream_takes_the_same_path(
    manual: ta.Device, backend: ManualBackend, recorder: Recorder
) -> None:
    x = await manual.put(np.eye(3))
    backend.device.fail[linalg.scal.spec] = _refusal
    with pytest.raises(ta.LibraryError) as caught:
        await ta.linalg.scal(2.0, x)
    assert recorder.phases("linalg.Scal") == WHOLE
    error = caught.value
    assert (error.device, error.operation, error.generation) == ("manual:0", "linalg.Scal", 1)


@pytest.mark.parametrize("error", [_refusal, lambda: RuntimeError("broken")])
async def test_an_error_of_the_launch_takes_the_same_path(
    manual: ta.Device, backend: ManualBackend, recorder: Recorder, error: Callable[[], Exception]
) -> None:
    x = await manual.put(np.eye(3))
    used = backend.device.memory().used
    backend.device.refuse[MatmulSpec] = error
    with pytest.raises((ta.LibraryError, ta.ActorFailedError)):
        await ta.linalg.matmul(x, np.eye(3))  # its operand is on the way when the launch fails
    await manual.synchronize()
    with pytest.raises((ta.LibraryError, ta.ActorFailedError)):
        await ta.linalg.matmul(x, x)
    await manual.synchronize()
    assert recorder.phases("linalg.Matmul") == WHOLE * 2
    assert backend.device.memory().used == used
    statistics = await manual.statistics()
    assert statistics.in_flight == 0
    assert statistics.launched == statistics.completed == 1


async def test_copies_that_run_all_the_same_keep_their_memory(
    manual: ta.Device, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    x = await manual.put(np.eye(3))
    used = backend.device.memory().used
    backend.device.refuse[MatmulSpec] = _refusal
    backend.device.is_held = True
    with pytest.raises(ta.LibraryError):
        await ta.linalg.matmul(x, np.eye(3))
    await wait_all_tasks_blocked()
    assert backend.device.memory().used > used  # the copy has not run
    backend.device.release()
    await manual.synchronize()
    assert backend.device.memory().used == used


async def test_a_copy_that_cannot_be_enqueued_leaves_nothing(
    manual: ta.Device, backend: ManualBackend, recorder: Recorder
) -> None:
    x = await manual.put(np.eye(3))
    used = backend.device.memory().used
    backend.device.refuse[CopyFromHostSpec] = _refusal
    with pytest.raises(ta.LibraryError):
        await ta.linalg.matmul(x, np.eye(3))
    await manual.synchronize()
    assert backend.device.memory().used == used
    assert recorder.phases("linalg.Matmul") == WHOLE


async def test_too_little_memory_is_part_of_the_same_path(manual: ta.Device, recorder: Recorder) -> None:
    with pytest.raises(ta.OutOfMemoryError):
        await manual.zeros(1 << 30)
    assert recorder.phases("devices.Empty") == WHOLE


async def test_a_refused_argument_is_not_even_validated(manual: ta.Device, recorder: Recorder) -> None:
    x = await manual.put(np.eye(3))
    with pytest.raises(ValueError, match=r"linalg\.matmul: the last axis of a"):
        await ta.linalg.matmul(x, np.ones((4, 4)))
    assert recorder.phases("linalg.Matmul") == []


async def test_a_hook_that_fails_hinders_neither_the_operation_nor_other_hooks(
    manual: ta.Device, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(phase: Phase, launch: Launch, /) -> None:
        if phase in {Phase.COMPLETE, Phase.REPLY, Phase.RELEASE}:
            raise RuntimeError(f"hook of {phase.value}")

    logged: list[str] = []
    logger = logging.getLogger("trio_accel.devices")
    monkeypatch.setattr(logger, "exception", lambda text, *args: logged.append(text % args))
    manual.state.hooks.insert(0, broken)
    with trio.fail_after(60):
        x = await manual.put(np.eye(3))
    assert recorder.phases("devices.Put") == WHOLE
    assert logged == [
        f"a hook failed in phase {phase} of devices.Put" for phase in ("complete", "reply", "release")
    ]
    manual.state.hooks.remove(broken)
    x.release()
    await ta.linalg.nrm2(await manual.zeros(1))
    await manual.synchronize()
    assert (await manual.statistics()).memory.used == 0


async def test_every_hook_sees_a_launch_that_a_hook_fails(manual: ta.Device, recorder: Recorder) -> None:
    x = await manual.put(np.eye(3))
    fault = ta.testing.inject_fault(manual, ta.linalg.Scal, fail=RuntimeError("injected"))
    manual.state.hooks.remove(recorder)
    manual.state.hooks.append(recorder)
    with pytest.raises(ta.ActorFailedError):
        await ta.linalg.scal(2.0, x)
    assert fault.hit == 1
    assert recorder.phases("linalg.Scal") == WHOLE


async def test_a_full_window_holds_the_next_launch_back(
    system: ta.System, backend: ManualBackend, nursery: trio.Nursery
) -> None:
    async with system.open_device(options=ta.DeviceOptions(in_flight=2)) as device:
        x = await device.put(np.ones(3))
        backend.device.is_held = True
        for _ in range(5):
            nursery.start_soon(ta.linalg.scal, 2.0, x)
        await wait_all_tasks_blocked()
        assert (await device.statistics()).in_flight == 2
        assert backend.device.enqueued.count("ScalSpec") == 2
        backend.device.stream("blas").step()
        backend.device.stream("blas").step()
        await wait_all_tasks_blocked()
        assert (await device.statistics()).in_flight == 2
        assert backend.device.enqueued.count("ScalSpec") == 3
        backend.device.release()
        await wait_all_tasks_blocked()
        np.testing.assert_array_equal(await x.to_host(), np.full(3, 32.0))
