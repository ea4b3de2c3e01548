"""The arrays of a device that was given up, on their way to the next."""

from __future__ import annotations

import attrs

from ...actors import System
from ...backends.base import AccelBackend, DeviceInfo, DeviceLostError
from ..base._options import DeviceOptions
from ..dispatch import LeftMemory, WorkerDispatch
from ._device import OpenDevice

__all__ = ["check_adoption", "options_of_heir", "take_memory"]


def options_of_heir(old: OpenDevice, options: DeviceOptions | None) -> DeviceOptions:
    """Choose the options of the device that adopts: as for the old one, where none are given.

    Raises:
        ValueError: The arrays are out of reach of such a device.
    """
    if options is None:
        options = old.options
    if options.isolation == "inline":
        raise ValueError(
            f"open_device: adopt: isolation='inline' has memory of its own in each context; the arrays of "
            f"{old.path} can only be adopted with isolation='process'"
        )
    return attrs.evolve(options, isolation="process")


async def check_adoption(system: System, old: OpenDevice) -> None:
    """Refuse a device that leaves nothing; waits for the end of one that is just being given up.

    Raises:
        ValueError: It is another system's, is open, was closed, or was adopted already.
        DeviceLostError: Its memory is lost.
    """
    if old.state.system is not system:
        raise ValueError(
            f"open_device: adopt: {old.path} is a device of another system; its memory is bound to that"
        )
    if not await old.wait_ended():
        raise ValueError(
            f"open_device: adopt: {old.path} is open; only a device that was given up can be adopted"
        )
    if not old.state.is_given_up:
        raise ValueError(
            f"open_device: adopt: {old.path} was closed, which gave its memory back; only a device that was "
            "given up can be adopted"
        )
    if not isinstance(old.dispatch, WorkerDispatch):
        raise DeviceLostError(
            "its arrays cannot be adopted: with isolation='inline' they were lost with its context; "
            "make them again",
            device=old.name,
        )
    if old.dispatch.adopted_by is not None:
        raise _adopted_already(old, old.dispatch)
    if old.state.memory_failure is not None:
        raise DeviceLostError(
            f"its arrays cannot be adopted: the hardware reported an uncorrectable error of its memory "
            f"({old.state.memory_failure}); make them again",
            device=old.name,
        )


def take_memory(
    old: OpenDevice, heir: str, backend: AccelBackend, info: DeviceInfo, options: DeviceOptions
) -> LeftMemory:
    """Take the memory of a device that was given up.

    Args:
        old: The device.
        heir: Path of the one that adopts.
        backend: Backend of that.
        info: Description of that.
        options: Its options.

    Raises:
        ValueError: It is other hardware, or has too little memory.
    """
    if info.name != old.name or backend.name != old.state.backend.name:
        raise ValueError(
            f"open_device: adopt: the arrays are in the memory of {old.name}, which {info.name} cannot use; "
            f"open {old.name!r}"
        )
    dispatch = old.dispatch
    assert isinstance(dispatch, WorkerDispatch)  # as `_check_adoption` has seen
    memory = dispatch.left
    if memory is None:
        # While this was on its way.
        raise _adopted_already(old, dispatch)
    limit = options.memory_limit
    if limit is not None and memory.nbytes > limit:
        raise ValueError(
            f"open_device: adopt: the arrays take {memory.nbytes} bytes, more than memory_limit = {limit}"
        )
    if old.state.leases:
        raise ValueError(
            f"open_device: adopt: {old.state.leases} of the arrays of {old.path} are leased; "
            "end the leases first"
        )
    memory.take(old.state.system)
    dispatch.left, dispatch.adopted_by = None, heir
    return memory


def _adopted_already(old: OpenDevice, dispatch: WorkerDispatch) -> ValueError:
    return ValueError(
        f"open_device: adopt: the arrays of {old.path} were adopted already, by {dispatch.adopted_by}"
    )
