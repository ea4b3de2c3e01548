"""Streams: threads that call PyTorch, one command after another.

On the processor the thread computes. On a card of AMD, Intel or NVIDIA it launches on a `torch.Stream` and
goes on, while a second thread waits for the events there, without the interpreter's lock, and signals the own
ones.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import queue
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch

from trio_accel.backends.base import AccelEvent, ContextPoisonedError, Waker

Command = Callable[[], object]


class TorchContext:
    """What the streams of a device share: whether it is lost, and why."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.reason: str | None = None

    def failure(self) -> ContextPoisonedError | None:
        """Return a new error each time, as each caller may raise it."""
        if self.reason is None:
            return None
        return ContextPoisonedError(f"the context is lost: {self.reason}", device=self._device)

    def note(self, error: BaseException) -> None:
        """Count the context as lost if a card reported an error: PyTorch can use it no longer."""
        # The class is of PyTorch 2.8 and later; before it only the text says so.
        kind = getattr(torch, "AcceleratorError", RuntimeError)
        text = str(error).partition("\n")[0]
        is_of_card = kind is not RuntimeError or text.startswith(("CUDA error", "HIP error"))
        if isinstance(error, kind) and is_of_card and "out of memory" not in text:
            self.reason = self.reason or text


class TorchEvent:
    """A point in a stream."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.passed = threading.Event()
        self._wakers: list[Waker] = []
        # A waker is rung by `notify` or by `signal`, and not by both.
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        """Whether the stream has passed it."""
        return self.passed.is_set()

    def notify(self, waker: Waker) -> None:
        """Ring when the stream is here, or now if it is."""
        with self._lock:
            if not self.is_done:
                self._wakers.append(waker)
                return
        waker.ring()

    def signal(self, error: Exception | None, *, is_lost: bool) -> None:
        """Note that the stream is here; a device that is lost rings nobody."""
        with self._lock:
            self.error = error
            self.passed.set()
            wakers, self._wakers = self._wakers, []
        for waker in () if is_lost else wakers:
            waker.ring()


class TorchHold:
    """Keeps a stream from going on, and perhaps writes to memory meanwhile."""

    def __init__(self, waker: Waker | None = None, memory: torch.Tensor | None = None) -> None:
        self._released = threading.Event()
        self._waker = waker
        self._memory = memory

    def release(self) -> None:
        """Let the stream go on."""
        self._released.set()

    def __call__(self) -> None:
        """Wait in the stream's thread."""
        if self._waker is not None:
            self._waker.ring()
        byte = 0
        while not self._released.wait(None if self._memory is None else 0.0001):
            if self._memory is not None:
                self._memory.fill_(byte)
                byte = (byte + 1) % 256


class TorchStream:
    """A queue of commands, and the thread that takes them in order; it starts with the first one.

    Args:
        name: For people.
        context: That of the device.
        device: Where it computes.
        priority: Of a card's stream; lower numbers come first there.
    """

    def __init__(self, name: str, context: TorchContext, device: torch.device, priority: int = 0) -> None:
        self.name: str = name
        self._context = context
        self._device = device
        self._priority = priority
        self._commands: queue.SimpleQueue[Command | TorchEvent | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._waiter: threading.Thread | None = None
        self._is_closed = False
        # Of cards with streams; what their thread has passed waits here for the card.
        self._card: Any = getattr(torch, device.type) if device.type in ("cuda", "xpu") else None
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()

    @property
    def failure(self) -> Exception | None:
        """Why the context is lost; None if it is not."""
        return self._context.failure()

    @property
    def is_preparing(self) -> bool:
        """False: nothing is compiled."""
        return False

    @property
    def has_ended(self) -> bool:
        """Whether it is closed, and its thread has ended."""
        threads = (self._thread, self._waiter)
        return self._is_closed and not any(thread is not None and thread.is_alive() for thread in threads)

    def enqueue(self, command: Command) -> None:
        """Put a command after all others, unless the context is lost."""
        failure = self.failure
        if failure is not None and not self._is_closed:
            raise failure
        self._put(command)

    def record(self) -> TorchEvent:
        """Put an event after all commands."""
        event = TorchEvent()
        self._put(event)
        return event

    def wait(self, event: AccelEvent) -> None:
        """Have the commands from now on wait for another stream's event."""
        if not isinstance(event, TorchEvent):
            raise TypeError(f"event: the backend waits for its own kind, not {event!r}")
        if not event.is_done:
            self._put(event.passed.wait)

    def hold(self, waker: Waker | None = None) -> TorchHold:
        """Hold the stream back."""
        hold = TorchHold(waker)
        self.enqueue(hold)
        return hold

    def crash(self) -> None:
        """Have the process end by a fault, for tests."""
        self.enqueue(_crash)

    def notify(self, event: AccelEvent, waker: Waker) -> None:
        """Ring when an event is done."""
        if not isinstance(event, TorchEvent):
            raise TypeError(f"event: the backend knows its own kind, not {event!r}")
        event.notify(waker)

    def synchronize(self) -> None:
        """Wait for all commands."""
        latch = _Latch()
        try:
            self._put(latch)
        except RuntimeError:
            self.join()
        else:
            latch.passed.wait()

    def close(self) -> None:
        """Take no more commands; the thread ends after the last one."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                self._commands.put(None)

    def join(self) -> None:
        """Wait for the end of the threads."""
        for thread in (self._thread, self._waiter):
            if thread is not None:
                thread.join()

    def _put(self, command: Command | TorchEvent) -> None:
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"stream {self.name!r} is closed and takes no more work")
            if self._thread is None:
                if self._card is not None:
                    waiter = f"{self.name} waits"
                    self._waiter = threading.Thread(target=self._wait_for_card, name=waiter, daemon=True)
                    self._waiter.start()
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._commands.put(command)

    def _run(self) -> None:
        try:
            with self._within(), torch.inference_mode(), np.errstate(all="ignore"):
                self._take()
        finally:
            self._launched.put(None)

    def _take(self) -> None:
        error: Exception | None = None
        while (command := self._commands.get()) is not None:
            if isinstance(command, (TorchEvent, _Latch)):
                if self._card is not None:
                    self._launched.put(_Launched(command, self._recorded(), error))
                else:
                    self._pass(command, error, torch.mps.synchronize if self._device.type == "mps" else None)
                # A latch takes no error.
                error = None if isinstance(command, TorchEvent) else error
            elif self._context.reason is None:
                error = self._called(command) or error
            command = None  # an idle thread holds no array

    def _wait_for_card(self) -> None:
        while (launched := self._launched.get()) is not None:
            event = launched.event
            self._pass(launched.command, launched.error, None if event is None else event.synchronize)
            launched = event = None

    def _pass(self, command: TorchEvent | _Latch, error: Exception | None, wait: Command | None) -> None:
        """Signal an event when the card has got there, with the error of the work before it."""
        if wait is not None and self._context.reason is None:
            error = self._called(wait) or error
        lost = self._context.failure()
        if isinstance(command, TorchEvent):
            command.signal(lost or error, is_lost=lost is not None)
        else:
            command()

    def _recorded(self) -> Any:
        """Record an event of the card; None if that fails, because then its context is lost."""
        if self._context.reason is not None:
            return None
        # The waiting thread sleeps; by default it would look again and again.
        event = self._card.Event(**({"blocking": True} if self._device.type == "cuda" else {}))
        return None if self._called(event.record) else event

    def _within(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which the thread launches on a stream of its own."""
        if self._card is None:
            return contextlib.nullcontext()
        least, greatest = self._card.Stream.priority_range()
        chosen = max(greatest, min(least, -self._priority))
        stack = contextlib.ExitStack()
        stack.enter_context(self._card.device(self._device))
        stack.enter_context(self._card.stream(self._card.Stream(self._device, priority=chosen)))
        return stack

    def _called(self, command: Command) -> Exception | None:
        try:
            command()
        except BaseException as error:  # noqa: BLE001  # the thread goes on, and the next event tells
            self._context.note(error)
            failure = (
                error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")
            )
            return failure.with_traceback(None)
        return None


def _crash() -> None:
    # A process that dies on purpose needs no report of it.
    faulthandler.disable()
    ctypes.string_at(0)


class _Latch:
    """A command that runs also where the context is lost, because somebody waits for it."""

    def __init__(self) -> None:
        self.passed = threading.Event()

    def __call__(self) -> None:
        self.passed.set()


class _Launched(NamedTuple):
    """A command that its stream's thread has passed, with the card's event after the work before it."""

    command: TorchEvent | _Latch
    event: Any
    error: Exception | None
