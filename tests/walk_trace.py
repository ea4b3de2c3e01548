"""Which files of the package an operation passes: a library whose kernels trace the process they run in."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

import attrs

import trio_accel as ta
from trio_accel.actors import DirectReply
from trio_accel.backends.base import Call, kernel, ops
from trio_accel.devices import LibraryActor, Operation, Planned, Planner
from trio_accel.devices.engine._in_flight import InFlight
from trio_accel.devices.operations._operation import Launch
from trio_accel.devices.worker.front._request import RemoteRequest

_ROOT = f"{Path(ta.__file__).parent}/"
_OPERATION = (Operation, Planned, Launch, InFlight, RemoteRequest, ops.OperationSpec)
# What begins an encoded request, or the answer to one.
_MESSAGES = frozenset({"request", "replay", "template", "early", "done"})

_seen: dict[str, None] = {}


def start() -> None:
    """Note from now on each file with a function that gets the operation as an argument, in order."""
    _seen.clear()
    sys.setprofile(_note)


def stop() -> list[str]:
    """End that; returns the files, by their paths below the package."""
    sys.setprofile(None)
    return list(_seen)


def _note(frame: FrameType, event: str, _: object) -> None:
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(_ROOT):
        count = code.co_argcount + code.co_kwonlyargcount
        if any(_is_operation(frame.f_locals.get(name)) for name in code.co_varnames[:count]):
            _seen[code.co_filename.removeprefix(_ROOT)] = None


def _is_operation(value: Any) -> bool:
    """Whether a value is the operation, in one of the forms that it takes on its way."""
    if isinstance(value, DirectReply):
        value = getattr(value, "message", None)
    launch = getattr(value, "launch", value) if isinstance(value, InFlight) else value
    if isinstance(launch, Launch) and isinstance(launch.spec, SwitchSpec):
        return False
    if type(value) is tuple and value and type(value[0]) is str:
        return value[0] in _MESSAGES
    return isinstance(value, _OPERATION)


@ops.specification
class SwitchSpec(ops.OperationSpec):
    """Starts a trace; or ends it, and writes the files to a path."""

    path: str = ops.exact()


class TraceActor(LibraryActor):
    """Serves `Switch`."""

    library = __name__


@attrs.frozen(eq=False)
class Switch(Operation[TraceActor, None]):
    """See `SwitchSpec`."""

    path: str = ""
    library: ClassVar[str] = f"{__name__}:TraceActor"

    def plan(self, planner: Planner) -> Planned[None]:
        return Planned(SwitchSpec(self.path), None)


def switched(spec: SwitchSpec, device: object) -> None:
    """Runs in the thread of the loop that launches: in a worker, in the worker's."""
    # No plan is kept, so that this is called each time.
    if spec.path:
        Path(spec.path).write_text(json.dumps(stop()), encoding="utf-8")
    else:
        start()


@kernel(SwitchSpec, backend="cpu", plan=switched, is_quick=True)
def switch(spec: SwitchSpec, call: Call) -> None:
    """Nothing is left to be done: see `switched`."""
