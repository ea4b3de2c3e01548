"""A snapshot that tests draw: two devices, one of them being rebuilt, an actor that fails, a queue."""

from __future__ import annotations

from trio_accel.telemetry import (
    ActorMemoryRow,
    ActorRow,
    CacheRow,
    DeviceRow,
    FailureRow,
    Histogram,
    LibraryRow,
    MemoryRow,
    OperationRow,
    SystemSnapshot,
)

__all__ = ["SHOP"]

_SECONDS = Histogram(bounds=(0.001, 0.01), counts=(1, 2, 3), total=1.0)

SHOP = SystemSnapshot(
    time=1_700_000_000.0,
    system="shop",
    pid=4711,
    uptime=3725.0,
    recorded=3725.0,
    rate=1237.75,
    dead_letters=2,
    actors=(
        ActorRow(path="shop", actor_class="System", state="running"),
        ActorRow(
            path="shop/till",
            actor_class="Till",
            state="running",
            mailbox_depth=3,
            mailbox_waiting=2,
            deferred=1,
            handled=12345,
            failed=7,
            restarts=7,
            last_error="ValueError: no price",
            rate=1234.5,
            p50=0.00035,
            p99=0.0125,
        ),
        ActorRow(path="shop/cpu:0", actor_class="DeviceActor", state="running"),
        ActorRow(
            path="shop/cpu:0/context",
            actor_class="WorkerContextActor",
            state="restarting",
            restarts=2,
            pid=4712,
        ),
        ActorRow(
            path="shop/cpu:0/context/blas",
            actor_class="BlasActor",
            state="running",
            handled=99,
            deferred=12,
            rate=3.25,
            p50=1.5,
            p99=75.0,
        ),
        ActorRow(path="shop/cpu:0/context/fft", actor_class="FftActor", state="quarantined"),
        ActorRow(
            path="shop/clerk",
            actor_class="Clerk",
            state="running",
            rate=0.1,
            p50=0.002,
            p99=0.002,
            array_bytes=4096,
        ),
    ),
    operations=(
        OperationRow(
            path="shop/till",
            message_type="Sell",
            completed=12338,
            failed=7,
            cancelled=1,
            dropped=2,
            queue=_SECONDS,
            run=_SECONDS,
            rate=1234.5,
            p50=0.00035,
            p99=0.0125,
        ),
        OperationRow(
            path="shop/clerk", message_type="Count", completed=2, queue=_SECONDS, run=_SECONDS, rate=0.1
        ),
    ),
    devices=(
        DeviceRow(
            path="shop/cpu:0",
            name="cpu:0",
            backend="cpu",
            isolation="process",
            state="restarting",
            generation=3,
            losses=2,
            recovery_time=0.0267,
            pending=4,
            pid=4712,
            age=0.1,
            in_flight=12,
            memory=MemoryRow(used=48 << 20, reserved=64 << 20, peak=50 << 20, blocks=9, limit=64 << 20),
            libraries=(
                LibraryRow(
                    library="trio_accel.fft:FftActor",
                    waiting=4,
                    in_flight=12,
                    plans=CacheRow(found=1999, made=1, evicted=0),
                    templates=CacheRow(found=3, made=1),
                    workspace=3 << 20,
                ),
                LibraryRow(library="my.models:Actor", in_flight=1),
            ),
            actors=(ActorMemoryRow(path="shop/clerk", used=4096), ActorMemoryRow(path="", used=8)),
        ),
    ),
    failures=(
        FailureRow(
            time=1_699_999_990.0,
            path="shop/till",
            kind="restart",
            message_type="Sell",
            error="ValueError: no price",
            traceback="Traceback (most recent call last):\n  in sell\nValueError: no price\n",
            count=7,
        ),
        FailureRow(
            time=1_699_999_999.0,
            path="shop/cpu:0/context",
            kind="restart",
            error="ContextPoisonedError: lost",
            traceback="ContextPoisonedError: lost",
        ),
    ),
)
