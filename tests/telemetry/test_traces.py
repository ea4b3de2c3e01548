"""Spans of messages and operations: their parents, their begin and end, and their attributes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, get_current_span
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta


@attrs.frozen
class Sum(ta.Request["Adder", int]):
    a: int
    b: int


@attrs.frozen
class Twice(ta.Request["Adder", int]):
    a: int


@attrs.frozen
class Sleep(ta.Request["Adder", None]):
    seconds: float


@attrs.frozen
class Fail(ta.Request["Adder", None]):
    pass


@attrs.frozen
class Later(ta.Request["Adder", int]):
    pass


@attrs.frozen
class Note(ta.Message["Adder"]):
    pass


class Adder(ta.Actor):
    def __init__(self, other: ta.Ref[Adder] | None = None, seen: list[object] | None = None) -> None:
        self.other = other
        # Current spans, and open replies.
        self.seen = [] if seen is None else seen

    @ta.handles(Sum)
    async def sum(self, message: Sum) -> int:
        self.seen.append(get_current_span())
        return message.a + message.b

    @ta.handles(Twice)
    async def twice(self, message: Twice) -> int:
        assert self.other is not None
        return await self.other.ask(Sum(message.a, message.a))

    @ta.handles(Sleep)
    async def sleep(self, message: Sleep) -> None:
        # clock: a mock clock of the caller, or work of any duration
        await trio.sleep(message.seconds)

    @ta.handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise LookupError("nothing there")

    @ta.handles(Later)
    async def later(self, message: Later) -> ta.DeferredReply[int]:
        reply: ta.DeferredReply[int] = self.context.defer()
        self.seen.append(reply)
        return reply

    @ta.handles(Note)
    async def note(self, message: Note) -> None:
        pass


class Spans:
    """The ended spans, by their names."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self.all = exporter.get_finished_spans()

    def __getitem__(self, name: str) -> ReadableSpan:
        (span,) = [span for span in self.all if span.name == name]
        return span

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.all if span.name == name]


def attributes(span: ReadableSpan) -> Mapping[str, object]:
    assert span.attributes is not None
    return span.attributes


def times(span: ReadableSpan) -> tuple[int, int]:
    assert span.start_time is not None
    assert span.end_time is not None
    return span.start_time, span.end_time


def events(span: ReadableSpan) -> list[str]:
    return [event.name for event in span.events]


def assert_child(child: ReadableSpan, parent: ReadableSpan) -> None:
    assert child.parent is not None
    assert child.context is not None
    assert parent.context is not None
    assert child.parent.span_id == parent.context.span_id
    assert child.context.trace_id == parent.context.trace_id


async def test_asks_are_children_of_the_asker_through_actors(
    system: ta.System, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    inner = await system.spawn(Adder, name="inner")
    outer = await system.spawn(Adder, inner, name="outer")
    tracer = provider.get_tracer("test")
    with ta.telemetry.trace(system, provider):
        with tracer.start_as_current_span("request"):
            assert await outer.ask(Twice(4)) == 8
        assert not get_current_span().get_span_context().is_valid  # the caller's own context is unchanged
        await inner.ask(Sum(1, 2))
    assert await inner.ask(Sum(1, 2)) == 3  # and no span
    spans = Spans(exporter)
    assert sorted(span.name for span in spans.all) == ["Sum", "Sum", "Twice", "request"]
    child, root = spans.named("Sum")
    assert_child(spans["Twice"], spans["request"])
    assert_child(child, spans["Twice"])
    assert root.parent is None
    assert attributes(child)["trio_accel.actor"] == "test/inner"
    assert events(child) == ["started"]
    assert child.status.status_code is StatusCode.UNSET
    (begin, end), (outer_begin, outer_end) = times(child), times(spans["Twice"])
    assert outer_begin <= begin <= child.events[0].timestamp <= end <= outer_end


@pytest.mark.parametrize("hours", [8, -2])
async def test_spans_follow_a_changed_clock(
    system: ta.System,
    device: ta.Device,
    provider: TracerProvider,
    exporter: InMemorySpanExporter,
    monkeypatch: pytest.MonkeyPatch,
    hours: int,
) -> None:
    """As on a machine after a suspension: its other clocks have stood still."""
    ref = await system.spawn(Adder, name="adder")
    real = time.time_ns
    with ta.telemetry.trace(system, provider):
        await ref.ask(Sum(1, 1))
        monkeypatch.setattr(time, "time_ns", lambda: real() + hours * 3600 * 10**9)
        await ref.ask(Sleep(0.0))
        await device.put(np.ones(3))
        now = time.time_ns()
    spans = Spans(exporter)
    for span in spans.all:
        begin, end = times(span)
        expected = real() if span.name == "Sum" else now
        assert begin <= end
        assert abs(end - expected) < 60 * 10**9, span.name
    assert {"Sum", "Sleep"} < {span.name for span in spans.all}


async def test_the_span_is_the_handlers_current_one_and_its_tasks_have_it(
    system: ta.System, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    current: list[object] = []
    ref = await system.spawn(Adder, None, current, name="adder")
    with ta.telemetry.trace(system, provider):
        await ref.ask(Sum(1, 1))
        await ref.tell(Note())
        await wait_all_tasks_blocked()
    (seen,) = current
    assert seen.get_span_context() == Spans(exporter)["Sum"].context  # type: ignore[attr-defined]
    assert Spans(exporter)["Note"].parent is None


async def test_an_error_is_recorded_with_its_type(
    system: ta.System, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    policy = ta.Policy(directives={LookupError: ta.Directive.RESUME})
    ref = await system.spawn(Adder, name="adder", policy=policy)
    with ta.telemetry.trace(system, provider), pytest.raises(LookupError):
        await ref.ask(Fail())
    span = Spans(exporter)["Fail"]
    assert span.status.status_code is StatusCode.ERROR
    assert attributes(span)["error.type"] == "builtins.LookupError"
    exception = span.events[-1]
    assert exception.name == "exception"
    assert exception.attributes is not None
    assert exception.attributes["exception.message"] == "nothing there"
    assert "raise LookupError" in str(exception.attributes["exception.stacktrace"])


async def test_a_cancelled_ask_is_marked_and_is_not_an_error(
    system: ta.System,
    provider: TracerProvider,
    exporter: InMemorySpanExporter,
    autojump_clock: trio.testing.MockClock,
) -> None:
    ref = await system.spawn(Adder, name="adder")
    with ta.telemetry.trace(system, provider):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ref.ask, Sleep(3.0))
            await wait_all_tasks_blocked()
            with trio.move_on_after(1.0):
                await ref.ask(Sum(1, 1))  # never begun: the other is being served
            nursery.cancel_scope.cancel()
    spans = Spans(exporter)
    for name, begun in (("Sum", []), ("Sleep", ["started"])):
        assert attributes(spans[name])["trio_accel.cancelled"] is True
        assert events(spans[name]) == [*begun, "cancelled"]
        assert spans[name].status.status_code is StatusCode.UNSET
    begin, end = times(spans["Sum"])
    assert end - begin == pytest.approx(1e9, rel=0.5)  # on Trio's clock


async def test_a_dropped_message_is_an_error(
    system: ta.System, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    mailbox = ta.MailboxOptions(capacity=1, overflow=ta.Overflow.DROP_OLDEST)
    ref = await system.spawn(Adder, name="adder", mailbox=mailbox)
    with ta.telemetry.trace(system, provider):
        for _ in range(3):
            ref.tell_nowait(Note())
        await wait_all_tasks_blocked()
    dropped, *served = Spans(exporter).named("Note")
    assert [events(span) for span in served] == [["started"], ["started"]]
    assert dropped.status.status_code is StatusCode.ERROR
    assert attributes(dropped)["error.type"] == "dropped"
    assert "in favour of a newer message" in str(dropped.status.description)


async def test_deferred_replies_that_overlap_have_a_span_each(
    system: ta.System, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    replies: list[Any] = []
    ref = await system.spawn(Adder, None, replies, name="adder")
    tracer = provider.get_tracer("test")

    async def ask(name: str) -> None:
        with tracer.start_as_current_span(name):
            await ref.ask(Later())

    with ta.telemetry.trace(system, provider):
        async with trio.open_nursery() as nursery:
            for name in ("first", "second"):
                nursery.start_soon(ask, name)
                await wait_all_tasks_blocked()
            replies[1].set(1)
            await wait_all_tasks_blocked()
            replies[0].set(0)
    spans = Spans(exporter)
    second, first = spans.named("Later")
    assert_child(first, spans["first"])
    assert_child(second, spans["second"])


async def test_open_spans_at_the_end_are_marked(
    system: ta.System, provider: TracerProvider, exporter: InMemorySpanExporter, nursery: trio.Nursery
) -> None:
    ref = await system.spawn(Adder, name="adder")
    with ta.telemetry.trace(system, provider):
        nursery.start_soon(ref.ask, Sleep(1e9))
        await wait_all_tasks_blocked()
    assert attributes(Spans(exporter)["Sleep"])["trio_accel.unfinished"] is True
    nursery.cancel_scope.cancel()


async def test_operations_are_linked_across_the_worker(
    system: ta.System, device: ta.Device, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    x = await device.put(np.eye(8))
    tracer = provider.get_tracer("test")
    with ta.telemetry.trace(system, provider), tracer.start_as_current_span("request"):
        await ta.linalg.matmul(x, x)
    spans = Spans(exporter)
    assert sorted(span.name for span in spans.all) == ["launch linalg.Matmul", "linalg.Matmul", "request"]
    ask, launch = spans["linalg.Matmul"], spans["launch linalg.Matmul"]
    assert_child(ask, spans["request"])
    assert_child(launch, ask)
    assert events(ask) == ["validated"]
    process = system.tree().find(f"{device.path}/context").pid or os.getpid()
    assert (process == os.getpid()) is (device.isolation == "inline")
    assert attributes(launch) == {
        "trio_accel.device": device.path,
        "trio_accel.library": "trio_accel.linalg:BlasActor",
        "process.pid": process,
    }
    (begin, end), (asked, replied) = times(launch), times(ask)
    assert asked <= ask.events[0].timestamp <= begin <= end <= replied
    with ta.telemetry.trace(system, provider):  # again
        await ta.linalg.matmul(x, x)
    assert len(Spans(exporter).named("launch linalg.Matmul")) == 2


async def test_a_later_device_and_many_at_once_are_traced(
    system: ta.System, isolation: str, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    options = ta.DeviceOptions(isolation=isolation)  # type: ignore[arg-type]
    with ta.telemetry.trace(system, provider):
        async with system.open_device(BACKEND, options=options) as device:
            x = await device.put(np.eye(4))
            async with trio.open_nursery() as nursery:
                for _ in range(20):
                    nursery.start_soon(ta.linalg.matmul, x, x)
            pending = device.submit(ta.linalg.Scal(2.0, x))
            await pending.wait()
            await device.synchronize()
    spans = Spans(exporter)
    asked = {span.context.span_id for span in spans.named("linalg.Matmul") if span.context}
    launched = [span.parent.span_id for span in spans.named("launch linalg.Matmul") if span.parent]
    assert len(asked) == len(launched) == 20
    assert set(launched) == asked
    assert spans["launch linalg.Scal"].parent is None
    assert not spans.named("linalg.Scal")


async def test_failed_and_cancelled_operations(
    system: ta.System, device: ta.Device, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    x = await device.put(np.eye(4))
    error = ta.LibraryError("no", library="blas", code=7)
    with ta.telemetry.trace(system, provider):
        ta.testing.inject_fault(device, ta.linalg.Matmul, fail=error)
        with pytest.raises(ta.LibraryError):
            await ta.linalg.matmul(x, x)
        with pytest.raises(ValueError, match="shape"):
            await ta.linalg.dot(x[0], np.ones(3))
        ta.testing.inject_fault(device, ta.linalg.Scal, delay=0.3)
        with trio.move_on_after(0.05) as scope:
            await ta.linalg.scal(2.0, x)
        assert scope.cancelled_caught
        await device.synchronize()
    spans = Spans(exporter)
    failed, refused, cancelled = spans["linalg.Matmul"], spans["linalg.Dot"], spans["linalg.Scal"]
    assert attributes(failed)["error.type"] == "trio_accel.backends.base.contract.errors.LibraryError"
    assert attributes(refused)["error.type"] == "builtins.ValueError"
    assert failed.status.status_code is refused.status.status_code is StatusCode.ERROR
    assert not spans.named("launch linalg.Dot")
    assert cancelled.status.status_code is StatusCode.UNSET
    assert events(cancelled) == ["validated", "cancelled"]
    # It continued without its caller.
    assert times(spans["launch linalg.Scal"])[1] > times(cancelled)[1]


async def test_a_lost_worker_is_an_error_of_the_ask(
    system: ta.System, provider: TracerProvider, exporter: InMemorySpanExporter
) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1)
    async with system.open_device(BACKEND, options=options) as device:
        x = await device.put(np.eye(4))
        with ta.telemetry.trace(system, provider):
            ta.testing.inject_fault(device, ta.linalg.Matmul, kill=True)
            await ta.linalg.matmul(x, x)  # runs again
            ta.testing.inject_fault(device, ta.linalg.Scal, kill=True)
            with pytest.raises(ta.ContextLostError):
                await ta.linalg.scal(2.0, x)
    spans = Spans(exporter)
    assert spans["linalg.Matmul"].status.status_code is StatusCode.UNSET
    assert "ContextLostError" in str(attributes(spans["linalg.Scal"])["error.type"])


async def test_nothing_stays_when_it_is_over(system: ta.System, device: ta.Device) -> None:
    opened = ta.devices.opened(device)
    ask = device.ask
    with ta.telemetry.trace(system, TracerProvider(shutdown_on_exit=False)):
        assert device.ask != ask
        assert system.observers.of_messages
        assert opened.state.hooks
    assert device.ask == ask
    assert not system.observers.of_messages
    assert not opened.state.hooks


async def test_without_opentelemetry_the_extra_is_named(
    system: ta.System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with pytest.raises(ta.NotSupportedError, match=r"'\.\[tracing\]'"), ta.telemetry.trace(system):
        pass


async def test_an_invalid_provider_or_system_is_refused(system: ta.System) -> None:
    untyped: Any = ta.telemetry.trace
    with (
        pytest.raises(TypeError, match=r"^trace: tracer_provider must make tracers, .* got 42"),
        untyped(system, 42),
    ):
        pass
    with pytest.raises(TypeError, match=r"^trace: system must be an open system"), untyped(42):
        pass
    with pytest.raises(TypeError, match=r"^timeline: system must be an open system"):
        ta.telemetry.timeline(42, "nowhere.json").__enter__()  # type: ignore[arg-type]
