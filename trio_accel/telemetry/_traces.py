"""Traces of a system: a timeline, which Perfetto and Chrome show, and spans of OpenTelemetry."""

from __future__ import annotations

import abc
import itertools
import json
import logging
import os
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from contextvars import Context
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TextIO, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import attrs
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import (
    ActorRestarted,
    ActorStarted,
    ActorSystem,
    ActorTerminated,
    Event,
    MessageCancelled,
    MessageCompleted,
    MessageDropped,
    MessageEvent,
    MessageFailed,
    MessageStarted,
    MessageWithdrawn,
    actor_path_of,
    around_each_system,
    describe,
)
from ..backends.base.kit.modules import import_extra
from ..devices import Ask, Launch, OpenDevice, Operation, Phase, System, opened

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext
    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = ["Timeline", "timeline", "trace"]

ServedT = TypeVar("ServedT")
WhereT = TypeVar("WhereT")


@attrs.define(eq=False)
class OperationSpan(Generic[WhereT]):
    """An operation that was validated.

    Attributes:
        where: Where its asker is.
        begun: When it was launched, by the watch's clock in nanoseconds.
        completed: When it was complete.
        process: The process that launched it.
    """

    where: WhereT
    begun: int = 0
    completed: int = 0
    process: int = attrs.field(factory=os.getpid)


class Watch(abc.ABC, Generic[ServedT, WhereT]):
    """Sees messages from the handler's start to the reply, and operations of devices in their five phases.

    A message that is served has a `ServedT`, and an operation a `WhereT`, from its beginning to its end.

    Args:
        epoch: Nanoseconds from which the clock counts, on the monotonic clock that all processes share.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = epoch
        # The requests that are served, by actor and number.
        self._served: dict[tuple[str, int], ServedT] = {}
        self._seen: WeakKeyDictionary[Launch, OperationSpan[WhereT]] = WeakKeyDictionary()

    @abc.abstractmethod
    def _observe(self, event: Event) -> None:
        """Take an event of an actor other than those of messages."""

    @abc.abstractmethod
    def _began(self, event: MessageStarted, context: Context) -> ServedT:
        """Take the start of a handler, and the context in which it runs."""

    @abc.abstractmethod
    def _finished(self, event: MessageEvent, served: ServedT | None) -> None:
        """Take the end of a message; None if its start was not seen, or it had none."""

    @abc.abstractmethod
    async def _ask(self, device: OpenDevice, ask: Ask, operation: Operation[Any, Any]) -> Any:
        """Pass an operation on, and return its reply."""

    @abc.abstractmethod
    def _validated(self, launch: Launch) -> WhereT:
        """Say where the asker of an operation is, in whose task this is called."""

    @abc.abstractmethod
    def _ended(self, device: OpenDevice, launch: Launch, seen: OperationSpan[WhereT]) -> None:
        """Take an operation that is over."""

    def _now(self) -> int:
        """Give the moment, in nanoseconds."""
        return time.monotonic_ns() + self._epoch

    @contextmanager
    def watch(self, system: ActorSystem) -> Generator[None]:
        """See a system, too, inside the ``with``, and all devices of it, from when they are opened.

        Operations of devices stay as fast as they are, as far as that depends on observers.
        """
        entered: dict[str, ExitStack] = {}
        # Prefixes of the paths of actors below a device: operations are seen by their phases.
        below: tuple[str, ...] = ()

        def enter_devices() -> None:
            nonlocal below
            for device in system.devices if isinstance(system, System) else ():
                if device.path not in entered:
                    entered[device.path] = ends = ExitStack()
                    ends.enter_context(self._enter(opened(device)))
            below = tuple(f"{path}/" for path in entered)

        def observe(event: Event) -> None:
            nonlocal below
            if isinstance(event, MessageEvent):
                if not event.path.startswith(below):
                    self._take(event)
                return
            if isinstance(event, ActorStarted) and not event.incarnation:
                enter_devices()
            elif isinstance(event, ActorTerminated) and event.path in entered:
                left = entered.pop(event.path)
                below = tuple(f"{path}/" for path in entered)
                left.close()
            self._observe(event)

        with system.subscribe(observe, every=False):
            try:
                enter_devices()
                yield
            finally:
                with ExitStack() as at_end:
                    for ends in entered.values():
                        at_end.push(ends)
                entered.clear()

    def _take(self, event: MessageEvent) -> None:
        key = event.path, event.number
        if not isinstance(event, MessageStarted):
            self._finished(event, self._served.pop(key, None))
        elif event.context is not None:
            self._served[key] = self._began(event, event.context)

    def _enter(self, device: OpenDevice) -> AbstractContextManager[None]:
        """See the operations of a device."""

        def see(phase: Phase, launch: Launch) -> None:
            if phase is Phase.VALIDATE:
                self._seen[launch] = OperationSpan(self._validated(launch))
            elif phase is Phase.REPLY:
                seen = self._seen.pop(launch, None)
                if seen is not None and self._is_told(device, launch, seen):
                    self._ended(device, launch, seen)
            elif (seen := self._seen.get(launch)) is not None:
                if phase is Phase.ENQUEUE:
                    seen.begun = self._now()
                elif phase is Phase.COMPLETE:
                    seen.completed = self._now()

        def around(ask: Ask) -> Ask:
            @enable_ki_protection
            async def asked(operation: Operation[Any, Any]) -> Any:
                return await self._ask(device, ask, operation)

            return asked

        return device.observed(see, around)

    def _is_told(self, device: OpenDevice, launch: Launch, seen: OperationSpan[WhereT]) -> bool:
        """Take the times of a worker, which launches there; false if it died before it could tell."""
        if device.isolation == "process":
            if launch.times is None:
                return False
            seen.process, begun, completed = attrs.astuple(launch.times)
            seen.begun, seen.completed = begun + self._epoch, completed + self._epoch
        return True


T = TypeVar("T")

_logger = logging.getLogger("trio_accel.telemetry")
# Seconds after which what was written is given to the file system: a program may be killed.
_FLUSHED = 1.0

# Process, name and track.
_Row: TypeAlias = tuple[int, str, int]
# The time of its begin, its track, and the name of the message.
_Served: TypeAlias = tuple[int, int, str]
_Asked: TypeAlias = tuple[int, _Row]

_NAME = "trio_accel"
# Nanoseconds by which the time of day differs from what is expected before it counts as set.
_SET = 10**9
_ACTOR, _DEVICE, _LIBRARY = "trio_accel.actor", "trio_accel.device", "trio_accel.library"
_CANCELLED, _UNFINISHED = "trio_accel.cancelled", "trio_accel.unfinished"
_PID, _ERROR_TYPE = "process.pid", "error.type"


@contextmanager
def timeline(system: ActorSystem | None, path: str | os.PathLike[str]) -> Generator[Timeline]:
    """Write what happens in a system to a file of trace events (JSON), inside the ``with``.

    Open it at https://ui.perfetto.dev or in ``chrome://tracing``. Each actor has a row with its messages,
    from the begin of the handler to the reply; those that overlap are in further rows of its. Each library of
    a device has a row, in the process that launches: an operation lasts there from its launch, or from the
    end of the one before it, to its completion. Tasks that are no actors' have rows with what they ask of
    devices. An arrow leads from an ask to its operation.

    Events are written as they come, so memory stays bounded. Where the file cannot be written any more, that
    is logged once, and the program goes on. An existing file is replaced.

    Args:
        system: The system; None for every one that is opened in this process meanwhile.
        path: The file.

    Raises:
        OSError: The file cannot be opened.
    """
    written = Timeline(Path(path).open("w", encoding="utf-8", buffering=1 << 16))  # noqa: SIM115  # `end` closes
    inside = around_each_system(written.watch) if system is None else written.watch(system)
    try:
        with inside:
            yield written
    finally:
        written.end()


class Timeline(Watch[_Served, _Asked]):
    """A timeline that is being written. Made by `timeline`.

    Attributes:
        events: How many were written.
    """

    def __init__(self, file: TextIO) -> None:
        super().__init__()
        self.events: int = 0
        self._file: TextIO | None = file
        self._begin = self._now()
        self._flushed = time.monotonic()
        self._pid = os.getpid()
        self._ids = itertools.count(1)
        # Rows by process, name and track; tracks in use by name.
        self._rows: dict[_Row, int] = {}
        self._tracks: dict[str, set[int]] = {}
        self._processes: set[int] = set()
        # The tracks of messages that are served.
        self._serving: dict[str, list[int]] = {}
        # The time when the last operation of a row was complete.
        self._over: dict[tuple[int, str], int] = {}
        # The tracks of tasks that ask now.
        self._asking: dict[trio.lowlevel.Task, _Row] = {}
        self._write_text("[\n")

    def end(self) -> None:
        """Write what is open still, and the end."""
        now = self._now()
        for (path, _), (begun, track, name) in self._served.items():
            self._slice((self._pid, path, track), name, "message", begun, now, {"outcome": "unfinished"})
        self._served.clear()
        self._write_text("\n]\n")
        file, self._file = self._file, None
        if file is not None:
            try:
                file.close()
            except OSError as error:
                self._give_up(file, error)

    # Messages.

    def _observe(self, event: Event) -> None:
        """See `Watch`."""
        if isinstance(event, ActorRestarted):
            why = None if event.error is None else describe(event.error)
            self._instant(event.path, "restart", {"error": why})
        elif isinstance(event, ActorTerminated):
            self._instant(event.path, "end", {"reason": event.reason})
            # Its rows, and those of the parts of its work, are not used again.
            below = f"{event.path}/"
            for name in [name for name in self._tracks if name == event.path or name.startswith(below)]:
                del self._tracks[name]
            for row in [row for row in self._rows if row[1] == event.path or row[1].startswith(below)]:
                del self._rows[row]

    def _began(self, event: MessageStarted, context: Context) -> _Served:
        """See `Watch`."""
        track = self._take_track(event.path)
        self._serving.setdefault(event.path, []).append(track)
        return self._now(), track, event.message_type

    def _finished(self, event: MessageEvent, served: _Served | None) -> None:
        """See `Watch`."""
        if served is None:
            if isinstance(event, (MessageDropped, MessageWithdrawn)):
                what = "dropped" if isinstance(event, MessageDropped) else "withdrawn"
                self._instant(event.path, f"{what} {event.message_type}", {})
            return
        begun, track, name = served
        about: dict[str, object] = {"outcome": _outcome_of(event)}
        if isinstance(event, (MessageCompleted, MessageFailed, MessageCancelled)):
            about["queued_us"] = round(event.queue_time * 1e6, 3)
        self._slice((self._pid, event.path, track), name, "message", begun, self._now(), about)
        self._tracks.get(event.path, set[int]()).discard(track)
        self._serving[event.path].remove(track)
        if not self._serving[event.path]:
            del self._serving[event.path]

    # Operations.

    async def _ask(self, device: OpenDevice, ask: Ask, operation: Operation[Any, Any]) -> Any:
        """See `Watch`."""
        task = trio.lowlevel.current_task()
        path = actor_path_of(task)
        if path is not None and path in self._serving:
            # The message that it serves is what is shown.
            return await ask(operation)
        begun, track = self._now(), self._take_track(task.name)
        row = self._asking[task] = self._pid, task.name, track
        outcome = "completed"
        try:
            return await ask(operation)
        except trio.Cancelled:
            outcome = "cancelled"
            raise
        except BaseException as error:
            outcome = f"failed: {describe(error)}"
            raise
        finally:
            name: str = getattr(operation, "operation", type(operation).__name__)
            self._slice(row, f"ask {name}", "ask", begun, self._now(), {"outcome": outcome})
            self._tracks[task.name].discard(track)
            del self._asking[task]

    def _validated(self, launch: Launch) -> _Asked:
        """See `Watch`: the moment, and the row from which the operation is asked."""
        now = self._now()
        task = trio.lowlevel.current_task()
        path = actor_path_of(task)
        if path is not None and path in self._serving:
            return now, (self._pid, path, self._serving[path][-1])
        row = self._asking.get(task)
        if row is None:
            # It waits for nothing.
            row = self._pid, f"{task.name} submits", 0
            self._slice(row, f"submit {launch.name}", "ask", now, now, {})
        return now, row

    def _ended(self, device: OpenDevice, launch: Launch, seen: OperationSpan[_Asked]) -> None:
        """See `Watch`."""
        process, begun, completed = seen.process, seen.begun, seen.completed
        if process not in self._processes and process != self._pid:
            self._name_process(process, f"worker of {device.path}")
        name = f"{device.path} {launch.library.partition('?')[0]}"
        start = min(max(begun, self._over.get((process, name), 0)), completed)
        self._over[process, name] = completed
        about = {"launched_us": self._us(begun), "behind_others_us": (start - begun) / 1000}
        row, number = (process, name, 0), next(self._ids)
        self._slice(row, launch.name, "operation", start, completed, about)
        flow = {"name": "ask", "cat": "flow", "id": number}
        asked, asker = seen.where
        self._event(asker, {"ph": "s", "ts": self._us(asked), **flow})
        self._event(row, {"ph": "f", "bp": "e", "ts": self._us(start), **flow})

    # The file.

    def _take_track(self, name: str) -> int:
        """Return the first track of a row that is free."""
        tracks = self._tracks.setdefault(name, set())
        track = next(track for track in itertools.count() if track not in tracks)
        tracks.add(track)
        return track

    def _us(self, moment: int) -> float:
        """Microseconds since the begin."""
        return max(moment - self._begin, 0) / 1000

    def _slice(self, row: _Row, name: str, kind: str, begun: int, ended: int, about: object) -> None:
        start = self._us(begun)
        event = {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": self._us(ended) - start}
        self._event(row, {**event, "args": about})

    def _instant(self, path: str, name: str, about: object) -> None:
        event = {"ph": "i", "s": "t", "name": name, "cat": "actor", "ts": self._us(self._now())}
        self._event((self._pid, path, 0), {**event, "args": about})

    def _event(self, row: _Row, event: dict[str, object]) -> None:
        process, name, track = row
        number = self._rows.get(row)
        if number is None:
            if process not in self._processes:
                self._name_process(process, "program")
            number = self._rows[row] = next(self._ids)
            shown = f"{name} ({track + 1})" if track else name
            self._write(process, number, {"ph": "M", "name": "thread_name", "args": {"name": shown}})
        self._write(process, number, event)

    def _name_process(self, process: int, name: str) -> None:
        self._processes.add(process)
        self._write(process, 0, {"ph": "M", "name": "process_name", "args": {"name": name}})

    def _write(self, process: int, row: int, event: dict[str, object]) -> None:
        text = json.dumps({"pid": process, "tid": row, **event}, separators=(",", ":"))
        self._write_text(f",\n{text}" if self.events else text)
        self.events += 1

    def _write_text(self, text: str) -> None:
        file = self._file
        if file is None:
            return
        try:
            file.write(text)
            now = time.monotonic()
            if now - self._flushed > _FLUSHED:
                self._flushed = now
                file.flush()
        except OSError as error:
            self._give_up(file, error)

    def _give_up(self, file: TextIO, error: OSError) -> None:
        _logger.error("the timeline ends here, as its file cannot be written: %s", error)
        self._file = None
        with suppress(OSError):
            file.close()


def _outcome_of(event: MessageEvent) -> str:
    if isinstance(event, MessageFailed):
        return f"failed: {describe(event.error)}"
    if isinstance(event, MessageDropped):
        return f"dropped: {event.reason}"
    return "completed" if isinstance(event, MessageCompleted) else "cancelled"


@contextmanager
def trace(system: ActorSystem, tracer_provider: TracerProvider | None = None) -> Generator[None]:
    """Make spans of messages and operations in a system, inside the ``with``. Needs the extra ``tracing``.

    A message to an actor is a span from its sending to its reply, named by its class, with an event
    ``started`` for the begin of its handler. It is a child of the sender's current span, and the current span
    of the handler: its own asks and spans are children of it.

    An operation of a device is a span of its asker, with an event ``validated``. Its child ``launch ...``
    lasts from the launch to the completion on the device. A worker tells these times with its answer, by a
    clock that all processes share. So no exporter runs in the worker, and no identity of a span crosses. An
    operation that was submitted has launches only.

    A span whose asker was cancelled has an event and an attribute ``trio_accel.cancelled``, and its status is
    unset. One that failed has the exception as an event, ``error.type``, and the status error.

    Args:
        system: The system; devices that are opened later belong to it, too.
        tracer_provider: Takes the spans; the global one of OpenTelemetry if there is none.

    Raises:
        NotSupportedError: OpenTelemetry is not installed.
    """
    api: Any = import_extra("opentelemetry.trace", "tracing")
    provider: TracerProvider = tracer_provider or api.get_tracer_provider()
    spans = _Spans(provider.get_tracer(_NAME))
    with spans.watch(system):
        try:
            yield
        finally:
            spans.close()


def _epoch() -> int:
    # All processes share the monotonic clock, and exporters want the other.
    return time.time_ns() - time.monotonic_ns()


class _Spans(Watch["Span", "TraceContext"]):
    """The spans of one system."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(epoch=_epoch())
        # The import stands here: the modules belong to an extra, which is there by now.
        from opentelemetry import context as contexts
        from opentelemetry import trace as traces

        self._tracer = tracer
        self._contexts = contexts
        self._traces = traces
        # The spans of those who ask for operations.
        self._asking: set[Span] = set()

    def close(self) -> None:
        """End what is still open."""
        for span in self._served.values():
            span.set_attribute(_UNFINISHED, True)
            span.end(self._now())
        self._served.clear()

    def _begin(self) -> int:
        """Give the moment at which a span begins; from here on all follow a time of day that was set."""
        if abs((epoch := _epoch()) - self._epoch) > _SET:
            self._epoch = epoch
        return self._now()

    # Messages.

    def _observe(self, event: Event) -> None:
        """See `Watch`: actors have no spans."""

    def _began(self, event: MessageStarted, context: Context) -> Span:
        """See `Watch`."""
        span, parent = self._span(event, context, event.queue_time)
        span.add_event("started", timestamp=self._now())
        _run_in(context, self._contexts.attach, self._traces.set_span_in_context(span, parent))
        return span

    def _finished(self, event: MessageEvent, served: Span | None) -> None:
        """See `Watch`."""
        span = served
        if span is None:
            if event.context is None or not isinstance(event, (MessageDropped, MessageWithdrawn)):
                return
            # Its handler never began.
            seconds = event.queue_time if isinstance(event, MessageWithdrawn) else 0.0
            span, _ = self._span(event, event.context, seconds)
        if isinstance(event, MessageFailed):
            self._record(span, event.error)
        elif isinstance(event, MessageDropped):
            span.set_attribute(_ERROR_TYPE, "dropped")
            span.set_status(self._traces.StatusCode.ERROR, event.reason)
        elif isinstance(event, (MessageCancelled, MessageWithdrawn)):
            _cancelled(span)
        span.end(self._now())

    def _span(self, event: MessageEvent, context: Context, seconds: float) -> tuple[Span, TraceContext]:
        parent = _run_in(context, self._contexts.get_current)
        begun, about = self._begin() - int(seconds * 1e9), {_ACTOR: event.path}
        span = self._tracer.start_span(event.message_type, parent, attributes=about, start_time=begun)
        return span, parent

    # Operations.

    async def _ask(self, device: OpenDevice, ask: Ask, operation: Operation[Any, Any]) -> Any:
        """See `Watch`."""
        contexts, parent = self._contexts, self._contexts.get_current()
        name: str = getattr(operation, "operation", type(operation).__name__)
        span = self._tracer.start_span(
            name, parent, attributes={_DEVICE: device.path}, start_time=self._begin()
        )
        token = contexts.attach(self._traces.set_span_in_context(span, parent))
        self._asking.add(span)
        try:
            return await ask(operation)
        except trio.Cancelled:
            _cancelled(span)
            raise
        except BaseException as error:
            self._record(span, error)
            raise
        finally:
            contexts.detach(token)
            self._asking.discard(span)
            span.end(self._now())

    def _validated(self, launch: Launch) -> TraceContext:
        """See `Watch`."""
        parent = self._contexts.get_current()
        span = self._traces.get_current_span(parent)
        if span in self._asking:
            span.add_event("validated", timestamp=self._now())
        return parent

    def _ended(self, device: OpenDevice, launch: Launch, seen: OperationSpan[TraceContext]) -> None:
        """See `Watch`."""
        library, name = launch.library.partition("?")[0], f"launch {launch.name}"
        about: dict[str, str | int] = {_DEVICE: device.path, _LIBRARY: library, _PID: seen.process}
        span = self._tracer.start_span(name, seen.where, attributes=about, start_time=seen.begun)
        for block in launch.outputs:
            if block.failure is not None and block.damaged_by == launch.name:
                self._record(span, block.failure)
                break
        span.end(seen.completed)

    def _record(self, span: Span, error: BaseException) -> None:
        cls = type(error)
        name = f"{cls.__module__}.{cls.__qualname__}"
        span.set_attribute(_ERROR_TYPE, name)
        span.set_status(self._traces.StatusCode.ERROR, describe(error))
        try:
            span.record_exception(error)
        except Exception:  # noqa: BLE001  # its text cannot be had
            span.add_event("exception", {"exception.type": name})


def _cancelled(span: Span) -> None:
    """Say that the asker was cancelled, which is no error."""
    span.set_attribute(_CANCELLED, True)
    span.add_event("cancelled")


def _run_in(context: Context, function: Callable[..., T], *args: object) -> T:
    """Call a function in the context of a message, which its actor's task may be in already."""
    try:
        is_current = trio.lowlevel.current_task().context is context
    except RuntimeError:
        # Trio delivers a cancellation, in no task.
        is_current = False
    return function(*args) if is_current else context.run(function, *args)
