"""What tracing adds: with each request sampled, and with one in a hundred."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING

import trio

import trio_accel as ta
from trio_accel.actors import ActorSystem

from ._harness import Plan, Result, alternate

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

__all__ = ["compare_traced"]

# By the end of the row's name, the share of requests whose spans are kept.
_SHARES = {"traced": 1.0, "traced-sampled": 0.01}


async def compare_traced(
    name: Callable[[str], str], system: ActorSystem, microseconds: Callable[[], Awaitable[float]], plan: Plan
) -> tuple[Result, ...]:
    """Measure with tracing on and off in turn; spans go to memory, one by one.

    Args:
        name: Makes the name of a row of its end.
        system: What is traced.
        microseconds: Measures once.
        plan: How often.
    """
    await trio.lowlevel.checkpoint()
    results: list[Result] = []
    for end, share in _SHARES.items():
        try:
            provider, exporter = _memory(share)
        except ImportError:
            results.append(Result(name=name(end), reason="OpenTelemetry's SDK is not installed"))
            continue

        pairs = await alternate(
            partial(_traced, system, provider, exporter, microseconds), microseconds, plan
        )
        provider.shutdown()
        results.append(Result.compare(name(end), pairs, unit="µs"))
    return tuple(results)


async def _traced(
    system: ActorSystem,
    provider: TracerProvider,
    exporter: InMemorySpanExporter,
    microseconds: Callable[[], Awaitable[float]],
) -> float:
    with ta.telemetry.trace(system, provider):
        found = await microseconds()
    exporter.clear()
    return found


def _memory(share: float) -> tuple[TracerProvider, InMemorySpanExporter]:
    """A provider that keeps the spans of a share of all traces in memory.

    Raises:
        ImportError: There is no SDK.
    """
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased

    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(TraceIdRatioBased(share)), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider, exporter
