"""Recording the operations of a step, for a graph."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from ..operations._operation import RECORDING, recording_now
from ..operations._pending import ReplyT
from ..operations._ref import AccelRef, Device
from ._device import opened
from ._recorder import OperationRecorder, Recorded

__all__ = ["Recorded", "record"]


async def record(
    device: Device,
    step: Callable[..., Awaitable[ReplyT]],
    arrays: Sequence[AccelRef],
    on_result: Callable[[ReplyT], ReplyT],
) -> tuple[Recorded, ReplyT]:
    """Record the operations that a step asks of a device. None is launched.

    The step gets arrays that stand for its arguments. They, and those that its operations make, are of no
    use when it has returned.

    Args:
        device: The device.
        step: Called once.
        arrays: Arguments of the step.
        on_result: Looks at the step's result, before its arrays are of no use any more.

    Raises:
        NotSupportedError: The step asks for something that a graph cannot have.
        TypeError: It is no async function.
        Exception: The error of the step.
    """
    state = opened(device).state
    state.check_run("capture")
    outer = recording_now()
    recording = OperationRecorder(device, state, outer if isinstance(outer, OperationRecorder) else None)
    inputs = [recording.stand_in(array) for array in arrays]
    token = RECORDING.set(recording)
    try:
        asked = step(*inputs)
        if not hasattr(asked, "__await__"):
            raise TypeError(f"capture: step must be an async function; it returned {type(asked).__name__}")
        reply = on_result(await asked)
    finally:
        RECORDING.reset(token)
        recording.end()
    return recording.recorded(inputs), reply
