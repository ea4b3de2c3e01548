"""Devices of both isolations, and spans kept in memory."""

from __future__ import annotations

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from trio_accel.backends.base import Isolation


@pytest.fixture(params=["inline", "process"])
def isolation(request: pytest.FixtureRequest) -> Isolation:
    """Tests of this folder that use it, or the `device`, run with both."""
    chosen: Isolation = request.param
    return chosen


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def provider(exporter: InMemorySpanExporter) -> TracerProvider:
    """A provider with spans that the `exporter` has as soon as they end."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider
