"""Calls that wait for a device in a thread that is not Trio's."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import TypeVar

import trio

from ..backends.base import DeviceLostError
from ..devices import Device

ResultT = TypeVar("ResultT")


class Blocking:
    """Runs async functions on the run of a device, and has the calling thread wait.

    Args:
        device: An open device of the Trio run that this is called in, or of the run whose worker thread this
            is called in.
        maker: Name of the function that makes what the program has, for errors.
        owner: What the program has: a backend, a namespace.
        instead: What to call in Trio's thread, with ``{}`` for the name of the function.

    Raises:
        RuntimeError: Called outside of a Trio run and its worker threads.
    """

    def __init__(self, device: Device, *, maker: str, owner: str, instead: str) -> None:
        self._device = device
        self._owner = owner
        self._instead = instead
        self._run = _this_run(maker)
        self._process = os.getpid()

    def call(self, name: str, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        """Call a function in the run, and return what it returns.

        Args:
            name: What the program calls, for errors.
            function: The function.

        Raises:
            RuntimeError: In Trio's thread, in a forked process, of another run, or without the device.
            trio.Cancelled: The task that waits for the worker thread is cancelled.
        """
        self._check_place(name)
        # Without a token it runs in the task that waits for this thread: its cancellation and context count.
        token = None if _is_trios_thread() else self._run
        return trio.from_thread.run(self._call, name, function, trio_token=token)

    def _check_place(self, name: str) -> None:
        if os.getpid() != self._process:
            # The run's loop is the parent's; here it would never answer.
            raise RuntimeError(
                f"{name}: the device {self._device.path} belongs to the process that this one was forked "
                "from; open a device here"
            )
        if trio.lowlevel.in_trio_run():
            raise RuntimeError(
                f"{name}: this {self._owner} waits for its device, which would block the Trio loop; call it "
                "in a worker thread (await trio.to_thread.run_sync(...)), or ask the device itself "
                f"({self._instead.format(name.rpartition('.')[2])})"
            )

    async def _call(self, name: str, function: Callable[[], Awaitable[ResultT]]) -> ResultT:
        if trio.lowlevel.current_trio_token() is not self._run:
            raise RuntimeError(
                f"the device {self._device.path} belongs to another Trio run than this worker thread"
            )
        try:
            return await function()
        except DeviceLostError as error:
            raise RuntimeError(
                f"{name}: this {self._owner} has no device any more ({error}); make one of a device that is "
                "open"
            ) from error


def _this_run(maker: str) -> trio.lowlevel.TrioToken:
    if trio.lowlevel.in_trio_run():
        return trio.lowlevel.current_trio_token()
    try:
        return trio.from_thread.run_sync(trio.lowlevel.current_trio_token)
    except RuntimeError as error:
        raise RuntimeError(
            f"{maker} must be called in the Trio run of the device, or in a worker thread of it"
        ) from error


def _is_trios_thread() -> bool:
    try:
        trio.from_thread.check_cancelled()
    except RuntimeError:
        return False
    return True
