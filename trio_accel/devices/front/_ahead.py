"""Calls without a launch: the layout of a result, and the operations that a composed function asks for.

A recorder plans operations for imaginary blocks. `evaluated` runs one call under such a recorder, with
placeholders for its operands, and it must not wait. Two questions are answered that way:

* `layout_of`: which layout does the result have?
* `body_of`: which operations does the function's body ask for, with which arrays? A gradient can then be
  derived from the body. Arrays are known by their blocks, so a view is an array like any other, however the
  body has made it. A body that reads elements on the host is refused, because its gradient would depend on
  them. So is one that changes an array, unless an operation writes the whole of an earlier result anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, ClassVar, cast

import attrs
import numpy as np

from ...backends.base import DType, HostArray, NotSupportedError
from ...backends.base.contract.ops import ArraySpec, contiguous_strides
from ..operations._calls import Call, SpentCall, evaluate
from ..operations._chain import (
    GATHER,
    ArrayFunction,
    Chain,
    ChainStep,
    Layouts,
    arguments_of,
    replaced,
    takes_number,
)
from ..operations._operation import RECORDING, Operation, PlannedFor, recording_now
from ..operations._pending import Pending, ReplyT
from ..operations._ref import AccelRef
from ._layout import leaves_of, map_tree
from ._recorder import LookingAhead, OperationRecorder, RecordingPlanner
from ._slots import Slot

_CALLS = (Call, SpentCall)


@attrs.frozen(eq=False)
class Body:
    """The operations that the body of a composed function asks for.

    Attributes:
        steps: In order: an operation, or a call of a function that was not looked into, and the result.
            All arrays are placeholders of the recording, or arrays from outside.
        operands: The operands of the function that are calls, each with its placeholders.
        result: The result of the function.
    """

    steps: Sequence[tuple[Operation[Any, Any] | Call[Any], Any]]
    operands: Sequence[tuple[Any, Any]]
    result: Any


class _BodyPlanner(RecordingPlanner):
    """A planner that refuses to change arrays, but for whole results of the body that are written anew."""

    def __init__(self, recording: BodyRecorder, operation: Operation[Any, Any]) -> None:
        super().__init__(recording, operation)
        out: Any = getattr(operation, "out", None)
        self._written = [id(out), *map(id, cast("Sequence[Any]", out) if isinstance(out, tuple) else ())]
        self._made = recording.made

    def _use(self, argument: str, ref: AccelRef, *, is_read: bool) -> None:
        is_new = id(ref) in self._written and id(ref.block) in self._made
        if not is_read and not (is_new and ref.nbytes == ref.block.nbytes):
            raise NotSupportedError(f"{self.name}: it changes an array", operation=self.name)
        super()._use(argument, ref, is_read=is_read)


class BodyRecorder(LookingAhead):
    """A recorder that keeps the operations of a body.

    Args:
        device: See `OperationRecorder`.
        state: See `OperationRecorder`.
        outer: See `OperationRecorder`.
        is_whole: Whether the calls of a composed function are kept as calls.

    Attributes:
        steps: See `Body`.
        made: The blocks of all results, by their `id`: `steps` keeps them.
    """

    planner: ClassVar[type[RecordingPlanner]] = _BodyPlanner

    def __init__(
        self,
        device: Any,
        state: PlannedFor,
        outer: OperationRecorder | None,
        is_whole: Callable[[ArrayFunction], bool],
    ) -> None:
        super().__init__(device, state, outer)
        self.steps: list[tuple[Operation[Any, Any] | Call[Any], Any]] = []
        self.made: set[int] = set()
        self._device = device
        self._is_whole = is_whole

    async def ask(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> ReplyT:
        """Plan an operation, and keep it."""
        result = await super().ask(device, operation)
        self._keep(operation, result)
        return result

    def submit(self, device: PlannedFor, operation: Operation[Any, ReplyT]) -> Pending[ReplyT]:
        """Plan an operation, and keep it, without a waiting task."""
        pending = super().submit(device, operation)
        self._keep(operation, pending.value)
        return pending

    def keep_calls(self, chain: Chain) -> None:
        """Let the steps of a chain keep their calls, but for composed functions that are looked into."""
        for step in chain.steps:
            function = step.function
            if function is GATHER:
                step.function = attrs.evolve(function, make=_together, how="value")
            elif function.how == "message" or (function.how == "awaitable" and self._is_whole(function)):
                step.function = attrs.evolve(
                    function, make=partial(self._called, function), how="value", ask=None
                )

    def _called(self, function: ArrayFunction, *args: Any, **named: Any) -> Any:
        call = Call[Any](function, args, named or None)
        call.silence()
        # Calls of placeholders have a device.
        layouts = self._device.look_ahead(call)
        result = map_tree(layouts, lambda spec: self.stand_in_for(spec.shape, spec.dtype))
        return self._keep(call, result)

    def _keep(self, asked: Operation[Any, Any] | Call[Any], result: Any) -> Any:
        if isinstance(result, np.ndarray):
            raise NotSupportedError("it reads elements on the host")
        self.steps.append((asked, result))
        self.made.update([id(ref.block) for ref in leaves_of(result) if isinstance(ref, AccelRef)])
        return result


def _together(*results: Any) -> tuple[Any, ...]:
    return results


def evaluated(step: ChainStep, recorder: LookingAhead, *, has_hosts: bool) -> tuple[Any, dict[int, Any]]:
    """Run a call under a recorder, with placeholders for calls and, if wanted, for host arrays.

    Args:
        step: The call. The layouts of its operands are known.
        recorder: The recorder, which is over afterwards.
        has_hosts: Whether host arrays have placeholders.

    Returns:
        The result, and the placeholders by the `id` of the argument.

    Raises:
        NotSupportedError: It waits, so its result is only known once it has run.
    """
    arguments = arguments_of(step)
    placeholders: dict[int, Any] = {
        id(operand): map_tree(operand.layouts, lambda spec: recorder.stand_in_for(spec.shape, spec.dtype))
        for operand in arguments
        if type(operand) in _CALLS
    }
    if has_hosts:
        hosts = [argument for argument in arguments if type(argument) is np.ndarray]
        placeholders.update(
            {id(host): recorder.stand_in_for(host.shape, DType.of(host.dtype)) for host in hosts}
        )
    slots = [argument for argument in arguments if isinstance(argument, Slot)]
    # The layout of `x * scale` does not depend on the scale, but `linspace` depends on its number.
    is_free = takes_number(step)
    placeholders.update({id(slot): 1.0 if is_free else slot.value_for_layout() for slot in slots})
    args, named = replaced(step, placeholders)
    asked = evaluate(step.function, args, named)
    token = RECORDING.set(recorder)
    try:
        asked.send(None)
    except StopIteration as done:
        return done.value, placeholders
    finally:
        asked.close()
        RECORDING.reset(token)
        recorder.end()
    raise NotSupportedError(
        f"{step.function.name}: its result is known once it has run; await the call",
        operation=step.function.name,
    )


def outer_recorder() -> OperationRecorder | None:
    """Return the recorder of the traced step that this is in: calls may use its placeholders."""
    outer = recording_now()
    return outer if isinstance(outer, OperationRecorder) else None


def layout_of(step: ChainStep, value: object) -> Layouts:
    """Return the layout of a call's result, of placeholders.

    Raises:
        NotSupportedError: The result cannot be an operand.
    """

    def see(leaf: object) -> ArraySpec | None:
        if isinstance(leaf, AccelRef):
            return leaf.spec
        if isinstance(leaf, np.ndarray):
            host: HostArray = cast("Any", leaf)
            dtype = DType.of(host.dtype)
            return ArraySpec(0, 0, dtype, host.shape, contiguous_strides(host.shape, dtype.itemsize))
        if leaf is not value and isinstance(leaf, (int, float)):
            # Numbers cannot be operands, but arrays in the same result can.
            return None
        raise _no_operand(step, type(leaf).__name__)

    layouts: Layouts | None = map_tree(value, see)
    if layouts is None:
        raise _no_operand(step, "a number")
    return layouts


def _no_operand(step: ChainStep, kind: str) -> NotSupportedError:
    name = step.function.name
    return NotSupportedError(
        f"{name} returns {kind}, which cannot be an operand; await it first", operation=name
    )
