"""Spans of OpenTelemetry for the messages of actors and the operations of devices."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any, TypeVar

import trio

from ..actors import (
    Event,
    MessageCancelled,
    MessageDropped,
    MessageEvent,
    MessageFailed,
    MessageStarted,
    MessageWithdrawn,
    describe,
)
from ..actors import System as ActorSystem
from ..backends.base.modules import import_extra
from ..devices import Ask, Launch, OpenDevice, Operation
from ._watch import Seen, Watch

if TYPE_CHECKING:
    from opentelemetry.context import Context as TraceContext
    from opentelemetry.trace import Span, Tracer, TracerProvider

__all__ = ["trace"]

T = TypeVar("T")

_NAME = "trio_accel"
_ACTOR, _DEVICE, _LIBRARY = "trio_accel.actor", "trio_accel.device", "trio_accel.library"
_CANCELLED, _UNFINISHED = "trio_accel.cancelled", "trio_accel.unfinished"
_PID, _ERROR_TYPE = "process.pid", "error.type"


@contextmanager
def trace(system: ActorSystem, tracer_provider: TracerProvider | None = None) -> Generator[None, None, None]:
    """Make spans of messages and operations in a system, inside the ``with``. Needs the extra ``tracing``.

    A message to an actor is a span from its sending to its reply, named by its class, with an event
    ``started`` for the begin of its handler. It is a child of the sender's current span, and the current span
    of the handler: its own asks and spans are children of it.

    An operation of a device is a span of its asker, with an event ``validated``. Its child ``launch ...``
    lasts from the launch to the completion on the device. A worker tells these times with its answer, by a
    clock that all processes share. So no exporter runs in the worker, and no identity of a span crosses. An
    operation that was submitted, or spans devices, has launches only.

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


class _Spans(Watch["Span", "TraceContext"]):
    """The spans of one system."""

    def __init__(self, tracer: Tracer) -> None:
        # All processes share the monotonic clock, and exporters want the other.
        super().__init__(epoch=time.time_ns() - time.monotonic_ns())
        # Here and not at the top: they belong to an extra, which is there by now.
        from opentelemetry import context as contexts
        from opentelemetry import trace as traces

        self._tracer = tracer
        self._contexts = contexts
        self._traces = traces
        # Of those who ask for operations.
        self._asking: set[Span] = set()

    def close(self) -> None:
        """End what is still open."""
        for span in self._served.values():
            span.set_attribute(_UNFINISHED, True)
            span.end(self._now())
        self._served.clear()

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
        span = self._tracer.start_span(
            event.message_type,
            parent,
            attributes={_ACTOR: event.path},
            start_time=self._now() - int(seconds * 1e9),
        )
        return span, parent

    # Operations.

    async def _ask(self, device: OpenDevice, ask: Ask, operation: Operation[Any, Any]) -> Any:
        """See `Watch`."""
        contexts, parent = self._contexts, self._contexts.get_current()
        name: str = getattr(operation, "operation", type(operation).__name__)
        span = self._tracer.start_span(
            name, parent, attributes={_DEVICE: device.path}, start_time=self._now()
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

    def _ended(self, device: OpenDevice, launch: Launch, seen: Seen[TraceContext]) -> None:
        """See `Watch`."""
        span = self._tracer.start_span(
            f"launch {launch.name}",
            seen.where,
            attributes={
                _DEVICE: device.path,
                _LIBRARY: launch.library.partition("?")[0],
                _PID: seen.process,
            },
            start_time=seen.begun,
        )
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
