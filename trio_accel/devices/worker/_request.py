"""Requests of the application that a worker serves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt
import outcome
import trio

from ...backends.base.ops import ArraySpec, CopyToHostSpec
from .._operation import Launch
from .._order import Turn
from ._channel import Message
from ._frames import SMALL
from ._wire import decode_array, encode_array, encode_spec
from ._wire_errors import encode_error

__all__ = ["LeaseRequest", "OperationRequest", "RemoteRequest"]


class RemoteRequest:
    """One request, from the moment it is handed over until its outcome; it may see several workers.

    Attributes:
        number: Its place in the order of the device's requests.
        library: Import path of the library that it goes to; "" for a lease.
        reads: Blocks that it reads.
        writes: Blocks that it changes.
        losses: How often the context was lost while it was in flight.
        turn: Its place behind those that it must follow, while it waits in the application.
        copies: Copies from or to host arrays that run for it now.
        failure: Why one of these failed.
        outcome_of_copies: The error, or None, to finish with when none of them runs any more.
    """

    __slots__ = (
        "_on_done",
        "_raise_cancel",
        "_result",
        "_task",
        "copies",
        "failure",
        "is_over",
        "library",
        "losses",
        "number",
        "outcome_of_copies",
        "reads",
        "turn",
        "writes",
    )

    def __init__(self, number: int, library: str, reads: frozenset[int], writes: frozenset[int]) -> None:
        self.number: int = number
        self.library: str = library
        self.reads: frozenset[int] = reads
        self.writes: frozenset[int] = writes
        self.losses: int = 0
        self.turn: Turn | None = None
        self.copies: int = 0
        self.failure: Exception | None = None
        self.is_over: bool = False
        self.outcome_of_copies: tuple[BaseException | None] | None = None
        self._result: outcome.Outcome[None] | None = None
        self._task: trio.lowlevel.Task | None = None
        self._raise_cancel: Callable[[], NoReturn] | None = None
        self._on_done: Callable[[BaseException | None], None] | None = None

    @property
    def is_cancelled(self) -> bool:
        """Whether the asker wants out."""
        return self._raise_cancel is not None

    def message(self, word: int, released: tuple[int, ...]) -> Message:
        """What is sent to the worker."""
        raise NotImplementedError

    def call_back(self, on_done: Callable[[BaseException | None], None]) -> None:
        """Hand the outcome to a function."""
        self._on_done = on_done

    async def wait(self, on_cancel: Callable[[RemoteRequest], bool]) -> None:
        """Wait for the outcome.

        Args:
            on_cancel: Called when the waiting task is cancelled; returns whether the request is withdrawn
                at once. Otherwise its end is waited for.
        """
        if self._result is not None:
            await trio.lowlevel.cancel_shielded_checkpoint()
            return self._result.unwrap()
        self._task = trio.lowlevel.current_task()

        def abort(raise_cancel: Callable[[], NoReturn]) -> trio.lowlevel.Abort:
            if on_cancel(self):
                self._task = None
                self.is_over = True
                return trio.lowlevel.Abort.SUCCEEDED
            self._raise_cancel = raise_cancel
            return trio.lowlevel.Abort.FAILED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def finish(self, error: BaseException | None) -> bool:
        """Give the outcome; a second one does nothing and returns False."""
        return self._settle(outcome.Value(None) if error is None else outcome.Error(error), error)

    def unwind(self) -> bool:
        """Give a cancelled asker its cancellation."""
        assert self._raise_cancel is not None
        return self._settle(outcome.capture(self._raise_cancel), None)

    def _settle(self, result: outcome.Outcome[None], error: BaseException | None) -> bool:
        if self.is_over:
            return False
        self.is_over = True
        task, self._task = self._task, None
        on_done, self._on_done = self._on_done, None
        if task is not None:
            trio.lowlevel.reschedule(task, result)
        elif on_done is not None:
            on_done(error)
        else:
            self._result = result
        return True


class OperationRequest(RemoteRequest):
    """A launch in a worker.

    Attributes:
        launch: What is launched.
        spoils: Whether its outputs are spoiled also if it was never launched.
        hosts: Host arrays that are copied to or from shared memory, by index.
        results: Host arrays that are filled from the reply.
    """

    __slots__ = ("hosts", "launch", "results", "spoils")

    def __init__(
        self, number: int, launch: Launch, reads: frozenset[int], writes: frozenset[int], *, spoils: bool
    ) -> None:
        super().__init__(number, launch.library, reads, writes)
        self.launch: Launch = launch
        self.spoils: bool = spoils
        self.hosts: list[npt.NDArray[Any]] = []
        self.results: list[npt.NDArray[Any]] = []

    @property
    def makes_all_it_writes(self) -> bool:
        """Whether it changes no array that was there before."""
        return self.writes <= {block for block, _ in self.launch.allocations}

    def message(self, word: int, released: tuple[int, ...]) -> Message:
        """What is sent to the worker.

        Raises:
            TypeError: The specification holds what cannot cross.
        """
        self.hosts, self.results = [], []
        launch = self.launch
        is_read = isinstance(launch.spec, CopyToHostSpec)
        plan = launch.fault
        fault = None
        if plan is not None:
            error = plan.fault.error
            fault = (
                launch.name,
                plan.fault.kind,
                plan.fault.seconds,
                None if error is None else encode_error(error),
            )
        return (
            "request",
            self.number,
            word,
            launch.name,
            self.library,
            self.spoils,
            encode_spec(launch.spec, self._filled if is_read else self._read),
            launch.allocations,
            tuple([encode_spec(staged, self._read) for staged in launch.staged]),
            tuple([block.id for block in launch.outputs]),
            tuple([(argument, block.id) for argument, block in launch.uses]),
            fault,
            released,
        )

    def fill(self, results: Any) -> None:
        """Fill host arrays from the reply."""
        for host, data in zip(self.results, results, strict=True):
            np.copyto(host, decode_array(data))

    def _read(self, host: npt.NDArray[Any]) -> object:
        """How the worker gets a host array: by value, or by a copy that it asks for."""
        if host.nbytes <= SMALL:
            return "value", encode_array(host)
        return self._copied(host)

    def _filled(self, host: npt.NDArray[Any]) -> object:
        """How a host array is filled: from the reply, or by a copy that the worker asks for."""
        if host.nbytes <= SMALL:
            self.results.append(host)
            return "result", encode_array(np.empty_like(host, shape=()))[0], host.shape
        return self._copied(host)

    def _copied(self, host: npt.NDArray[Any]) -> object:
        self.hosts.append(host)
        return "copy", len(self.hosts) - 1


class LeaseRequest(RemoteRequest):
    """Memory that the program holds; it survives the worker, and holds the same in the next."""

    __slots__ = ("array", "block", "granted", "is_given_back")

    def __init__(self, number: int, array: ArraySpec, *, write: bool) -> None:
        block = frozenset([array.block])
        super().__init__(number, "", frozenset() if write else block, block if write else frozenset())
        self.array: ArraySpec = array
        self.granted: trio.Event = trio.Event()
        self.is_given_back: bool = False

    def message(self, word: int, released: tuple[int, ...]) -> Message:
        """What is sent to the worker."""
        return "lease", self.number, self.array.block, bool(self.writes), released
