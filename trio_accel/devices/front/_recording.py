"""Recording of a step's operations, for a graph."""

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
    """Record the operations that a step runs on a device, without launching them.

    The step gets placeholders of its arguments. They, and the arrays that its operations make, become
    unusable when it has returned.

    Args:
        device: The device.
        step: Called once.
        arrays: The arguments of the step.
        on_result: Examines the step's result before its arrays become unusable.

    Raises:
        NotSupportedError: The step uses an operation that a graph cannot contain.
        TypeError: The step is not an async function.
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
