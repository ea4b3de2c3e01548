"""Traces of a system: a timeline for Perfetto and Chrome, and spans for OpenTelemetry."""

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
from ._recorder import check_system

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext
    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = ["Timeline", "timeline", "trace"]

ServedT = TypeVar("ServedT")
WhereT = TypeVar("WhereT")


@attrs.define(eq=False)
class OperationSpan(Generic[WhereT]):
    """A validated operation.

    Attributes:
        origin: The place of its caller.
        begun: The time of its launch, by the watch's clock in nanoseconds.
        completed: The time of its completion.
        process: The process that launched it.
    """

    origin: WhereT
    begun: int = 0
    completed: int = 0
    process: int = attrs.field(factory=os.getpid)


class Watch(abc.ABC, Generic[ServedT, WhereT]):
    """Observes messages from the handler's start to the reply, and device operations in their five phases.

    A message being served has a `ServedT`, and an operation a `WhereT`, from its beginning to its end.

    Args:
        epoch: The zero of the clock in nanoseconds, on the monotonic clock that all processes share.
    """

    def __init__(self, epoch: int = 0) -> None:
        self._epoch = epoch
        # The requests being served, by actor and number.
        self._served: dict[tuple[str, int], ServedT] = {}
        self._seen: WeakKeyDictionary[Launch, OperationSpan[WhereT]] = WeakKeyDictionary()

    @abc.abstractmethod
    def _observe(self, event: Event) -> None:
        """Handle an actor event other than a message event."""

    @abc.abstractmethod
    def _began(self, event: MessageStarted, context: Context) -> ServedT:
        """Handle the start of a handler, and the context in which it runs."""

    @abc.abstractmethod
    def _finished(self, event: MessageEvent, served: ServedT | None) -> None:
        """Handle the end of a message; `served` is None if its start was not seen, or did not happen."""

    @abc.abstractmethod
    async def _ask(self, device: OpenDevice, ask: Ask, operation: Operation[Any, Any]) -> Any:
        """Pass an operation on, and return its reply."""

    @abc.abstractmethod
    def _validated(self, launch: Launch) -> WhereT:
        """Return the place of an operation's caller; called in the caller's task."""

    @abc.abstractmethod
    def _ended(self, device: OpenDevice, launch: Launch, operation: OperationSpan[WhereT]) -> None:
        """Handle an operation that is over."""

    def _now(self) -> int:
        """Return the current time in nanoseconds."""
        return time.monotonic_ns() + self._epoch

    @contextmanager
    def watch(self, system: ActorSystem) -> Generator[None]:
        """Also observe a system inside the ``with``, and all its devices after they are opened.

        Operations of devices keep their speed, as far as that depends on observers.
        """
        entered: dict[str, ExitStack] = {}
        # Path prefixes of actors below a device; their operations are observed by phases instead.
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
                stack = entered.pop(event.path)
                below = tuple(f"{path}/" for path in entered)
                stack.close()
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
        """Observe the operations of a device."""

        def see(phase: Phase, launch: Launch) -> None:
            if phase is Phase.VALIDATE:
                self._seen[launch] = OperationSpan(self._validated(launch))
            elif phase is Phase.REPLY:
                operation = self._seen.pop(launch, None)
                if operation is not None and self._is_told(device, launch, operation):
                    self._ended(device, launch, operation)
            elif (operation := self._seen.get(launch)) is not None:
                if phase is Phase.ENQUEUE:
                    operation.begun = self._now()
                elif phase is Phase.COMPLETE:
                    operation.completed = self._now()

        def around(ask: Ask) -> Ask:
            @enable_ki_protection
            async def asked(operation: Operation[Any, Any]) -> Any:
                return await self._ask(device, ask, operation)

            return asked

        return device.observed(see, around)

    def _is_told(self, device: OpenDevice, launch: Launch, operation: OperationSpan[WhereT]) -> bool:
        """Take the times from a worker, which launches there; return False if it died before its report."""
        if device.isolation == "process":
            if launch.times is None:
                return False
            operation.process, begun, completed = attrs.astuple(launch.times)
            operation.begun, operation.completed = begun + self._epoch, completed + self._epoch
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
# The difference in nanoseconds from the expected time of day that counts as a change of the clock.
_SET = 10**9
_ACTOR, _DEVICE, _LIBRARY = "trio_accel.actor", "trio_accel.device", "trio_accel.library"
_CANCELLED, _UNFINISHED = "trio_accel.cancelled", "trio_accel.unfinished"
_PID, _ERROR_TYPE = "process.pid", "error.type"


@contextmanager
def timeline(system: ActorSystem | None, path: str | os.PathLike[str]) -> Generator[Timeline]:
    """Write the events of a system to a file of trace events (JSON), inside the ``with``.

    Open it at https://ui.perfetto.dev or in ``chrome://tracing``. Each actor has a row with its messages,
    from the start of the handler to the reply; overlapping messages are in further rows. Each library of a
    device has a row, in the process that launches: an operation lasts there from its launch, or from the end
    of the previous one, to its completion. Tasks outside of actors have rows with their calls to devices. An
    arrow leads from a call to its operation.

    Events are written when they happen, so memory stays bounded. If the file can no longer be written, that
    is logged once, and the program continues. An existing file is replaced.

    Args:
        system: The system; None for every system opened in this process during the body.
        path: The file.

    Raises:
        OSError: The file cannot be opened.
        TypeError: `system` is not an open system.
    """
    if system is not None:
        check_system("timeline", system)
    written = Timeline(Path(path).open("w", encoding="utf-8", buffering=1 << 16))  # noqa: SIM115  # `end` closes
    inside = around_each_system(written.watch) if system is None else written.watch(system)
    try:
        with inside:
            yield written
    finally:
        written.end()


class Timeline(Watch[_Served, _Asked]):
    """A timeline in progress. Made by `timeline`.

    Attributes:
        events: The number of written events.
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
        # The tracks of messages being served.
        self._serving: dict[str, list[int]] = {}
        # The time when the last operation of a row was complete.
        self._over: dict[tuple[int, str], int] = {}
        # The tracks of tasks with a call in progress.
        self._asking: dict[trio.lowlevel.Task, _Row] = {}
        self._write_text("[\n")

    def end(self) -> None:
        """Write unfinished events, and the end."""
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
            error_text = None if event.error is None else describe(event.error)
            self._instant(event.path, "restart", {"error": error_text})
        elif isinstance(event, ActorTerminated):
            self._instant(event.path, "end", {"reason": event.reason})
            # Its rows, and the rows of its parts, are not used again.
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
                outcome = "dropped" if isinstance(event, MessageDropped) else "withdrawn"
                self._instant(event.path, f"{outcome} {event.message_type}", {})
            return
        begun, track, name = served
        details: dict[str, object] = {"outcome": _outcome_of(event)}
        if isinstance(event, (MessageCompleted, MessageFailed, MessageCancelled)):
            details["queued_us"] = round(event.queue_time * 1e6, 3)
        self._slice((self._pid, event.path, track), name, "message", begun, self._now(), details)
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
            # The message being served is already shown.
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
        """See `Watch`: return the time, and the row of the operation's caller."""
        now = self._now()
        task = trio.lowlevel.current_task()
        path = actor_path_of(task)
        if path is not None and path in self._serving:
            return now, (self._pid, path, self._serving[path][-1])
        row = self._asking.get(task)
        if row is None:
            # Submitting does not wait.
            row = self._pid, f"{task.name} submits", 0
            self._slice(row, f"submit {launch.name}", "ask", now, now, {})
        return now, row

    def _ended(self, device: OpenDevice, launch: Launch, operation: OperationSpan[_Asked]) -> None:
        """See `Watch`."""
        process, begun, completed = operation.process, operation.begun, operation.completed
        if process not in self._processes and process != self._pid:
            self._name_process(process, f"worker of {device.path}")
        name = f"{device.path} {launch.library.partition('?')[0]}"
        start = min(max(begun, self._over.get((process, name), 0)), completed)
        self._over[process, name] = completed
        details = {"launched_us": self._us(begun), "behind_others_us": (start - begun) / 1000}
        row, number = (process, name, 0), next(self._ids)
        self._slice(row, launch.name, "operation", start, completed, details)
        flow = {"name": "ask", "cat": "flow", "id": number}
        asked, asker = operation.origin
        self._event(asker, {"ph": "s", "ts": self._us(asked), **flow})
        self._event(row, {"ph": "f", "bp": "e", "ts": self._us(start), **flow})

    # The file.

    def _take_track(self, name: str) -> int:
        """Return the first free track of a row."""
        tracks = self._tracks.setdefault(name, set())
        track = next(track for track in itertools.count() if track not in tracks)
        tracks.add(track)
        return track

    def _us(self, moment: int) -> float:
        """Return the microseconds since the beginning."""
        return max(moment - self._begin, 0) / 1000

    def _slice(self, row: _Row, name: str, kind: str, begun: int, ended: int, details: object) -> None:
        start = self._us(begun)
        event = {"ph": "X", "name": name, "cat": kind, "ts": start, "dur": self._us(ended) - start}
        self._event(row, {**event, "args": details})

    def _instant(self, path: str, name: str, details: object) -> None:
        event = {"ph": "i", "s": "t", "name": name, "cat": "actor", "ts": self._us(self._now())}
        self._event((self._pid, path, 0), {**event, "args": details})

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
    ``started`` for the start of its handler. It is a child of the sender's current span, and the current span
    of the handler, so the handler's own calls and spans are its children.

    An operation of a device is a span of its caller, with an event ``validated``. Its child ``launch ...``
    lasts from the launch to the completion on the device. A worker reports these times with its answer, by a
    clock that all processes share. So no exporter runs in the worker, and no span identity crosses. A
    submitted operation only has launches.

    A span with a cancelled caller has an event and an attribute ``trio_accel.cancelled``, and an unset
    status. A failed span has the exception as an event, ``error.type``, and the status error.

    Args:
        system: The system, including devices that are opened later.
        tracer_provider: Receives the spans; by default OpenTelemetry's global provider.

    Raises:
        NotSupportedError: OpenTelemetry is not installed.
        TypeError: `system` is not an open system, or `tracer_provider` makes no tracers.
    """
    check_system("trace", system)
    api: Any = import_extra("opentelemetry.trace", "tracing")
    if tracer_provider is not None and not callable(getattr(tracer_provider, "get_tracer", None)):
        raise TypeError(
            "trace: tracer_provider must make tracers, such as opentelemetry.sdk.trace.TracerProvider(), "
            f"got {tracer_provider!r}"
        )
    provider: TracerProvider = tracer_provider or api.get_tracer_provider()
    spans = _Spans(provider.get_tracer(_NAME))
    with spans.watch(system):
        try:
            yield
        finally:
            spans.close()


def _epoch() -> int:
    # All processes share the monotonic clock, but exporters want the time of day.
    return time.time_ns() - time.monotonic_ns()


class _Spans(Watch["Span", "TraceContext"]):
    """The spans of one system."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__(epoch=_epoch())
        # Import here, because the modules belong to an extra, which is installed if this runs.
        from opentelemetry import context as contexts
        from opentelemetry import trace as traces

        self._tracer = tracer
        self._contexts = contexts
        self._traces = traces
        # The spans of those who ask for operations.
        self._asking: set[Span] = set()

    def close(self) -> None:
        """End unfinished spans."""
        for span in self._served.values():
            span.set_attribute(_UNFINISHED, True)
            span.end(self._now())
        self._served.clear()

    def _begin(self) -> int:
        """Return the time at which a span begins; later spans follow a change of the clock."""
        if abs((epoch := _epoch()) - self._epoch) > _SET:
            self._epoch = epoch
        return self._now()

    # Messages.

    def _observe(self, event: Event) -> None:
        """See `Watch`: actors do not have spans."""

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
        begun, attributes = self._begin() - int(seconds * 1e9), {_ACTOR: event.path}
        span = self._tracer.start_span(event.message_type, parent, attributes=attributes, start_time=begun)
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

    def _ended(self, device: OpenDevice, launch: Launch, operation: OperationSpan[TraceContext]) -> None:
        """See `Watch`."""
        library, name = launch.library.partition("?")[0], f"launch {launch.name}"
        attributes: dict[str, str | int] = {_DEVICE: device.path, _LIBRARY: library, _PID: operation.process}
        span = self._tracer.start_span(
            name, operation.origin, attributes=attributes, start_time=operation.begun
        )
        for block in launch.outputs:
            if block.failure is not None and block.damaged_by == launch.name:
                self._record(span, block.failure)
                break
        span.end(operation.completed)

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
    """Mark a span as cancelled by its caller, which is not an error."""
    span.set_attribute(_CANCELLED, True)
    span.add_event("cancelled")


def _run_in(context: Context, function: Callable[..., T], *args: object) -> T:
    """Call a function in the context of a message, which its actor's task may have entered already."""
    try:
        is_current = trio.lowlevel.current_task().context is context
    except RuntimeError:
        # Trio delivers a cancellation, in no task.
        is_current = False
    return function(*args) if is_current else context.run(function, *args)
