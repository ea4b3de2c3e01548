"""What takes less than its event shares one with others; nobody waits for what is heavier because of that."""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import pytest

import trio_accel as ta
from trio_accel.backends.base import LibraryError
from trio_accel.backends.base.ops import CopySpec, MatmulSpec

pytestmark = pytest.mark.usefixtures("only_cuda")

_SHARING = 8


@pytest.fixture
def light(rig: Any) -> MatmulSpec:
    """A product that is a graph from here on."""
    rng = np.random.default_rng(0)
    a, b = (rig.put(rng.standard_normal((4, 4))) for _ in range(2))
    spec = MatmulSpec(a, b, rig.empty((4, 4), "float64"))
    prepare = rig.library("blas").prepare(spec)
    if prepare is not None:
        prepare()
    for _ in range(3):
        rig.apply("blas", spec)
    return spec


def share(rig: Any, spec: MatmulSpec, count: int) -> list[Any]:
    events: list[Any] = []
    for _ in range(count):
        rig.enqueue("blas", spec)
        events.append(rig.stream.record_deferred())
    return events


def test_so_many_share_one_and_it_is_done_behind_the_last(
    rig: Any, light: MatmulSpec, writes: list[int]
) -> None:
    events = share(rig, light, 2 * _SHARING)
    assert [len({id(event) for event in half}) for half in (events[:_SHARING], events[_SHARING:])] == [1, 1]
    assert events[0] is not events[-1]
    assert writes == [events[0].sequence, events[-1].sequence]
    rig.stream.synchronize()
    assert all(event.is_done for event in events)


def test_fewer_are_done_when_they_are_flushed_and_not_before(
    rig: Any, light: MatmulSpec, writes: list[int]
) -> None:
    first, second = share(rig, light, 2)
    assert (first is second, writes) == (True, [])
    rig.device.context.check(_synchronize(rig.stream))
    assert not first.is_done
    rig.stream.flush()
    rig.stream.flush()
    rig.stream.synchronize()
    assert (first.is_done, len(writes)) == (True, 1)


def _synchronize(stream: Any) -> Any:
    """Without the stream's own, which flushes."""
    from cuda.bindings import driver

    return driver.cuStreamSynchronize(stream.handle)


def test_a_record_closes_what_is_shared(rig: Any, light: MatmulSpec) -> None:
    (shared,) = share(rig, light, 1)
    rig.enqueue("blas", light)
    assert rig.stream.record() is shared
    rig.enqueue("blas", light)
    assert rig.stream.record() is not shared


@pytest.mark.parametrize("how", ["copy", "large", "hold", "spin", "close", "synchronize", "notify", "wait"])
def test_whatever_is_heavier_closes_it_first(
    rig: Any, light: MatmulSpec, writes: list[int], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = _large(rig, light, monkeypatch) if how == "large" else None
    other = rig.device.open_stream("other")
    writes.clear()
    (shared,) = share(rig, light, 1)
    if how == "copy":
        rig.enqueue("memory", CopySpec(light.a, light.out))
    elif how == "large":
        rig.enqueue("blas", large)
    elif how == "hold":
        rig.stream.hold().release()
    elif how == "spin":
        rig.device.spin(rig.stream).release()
    elif how == "notify":
        rig.stream.notify(shared, Bell())
    elif how == "wait":
        other.wait(shared)
    else:
        getattr(rig.stream, how)()
    assert writes[0] == shared.sequence
    if how not in {"close", "synchronize", "notify", "wait"}:
        # What comes now is behind something heavy: it shares with nobody.
        rig.enqueue("memory", CopySpec(light.a, light.out))
        assert rig.stream.record_deferred() is not shared
    rig.stream.synchronize()
    other.synchronize()
    assert shared.is_done


def _large(rig: Any, light: MatmulSpec, monkeypatch: pytest.MonkeyPatch) -> MatmulSpec:
    """A graph, too, of a product that is taken for one which takes long."""
    from trio_accel.backends.cuda.libraries import blas

    monkeypatch.setattr(blas, "_LIGHT", 4 * 4 * 4)
    a, b = rig.put(np.ones((5, 4))), rig.put(np.ones((4, 5)))
    large = MatmulSpec(a, b, rig.empty((5, 5), "float64"))
    for _ in range(3):
        rig.apply("blas", large)
    assert len(rig.device.graphs) == 2
    return large


class Bell:
    """Somebody who may be woken."""

    def ring(self) -> None:
        """Nobody is."""


def test_what_ends_on_the_host_has_its_own(rig: Any, light: MatmulSpec) -> None:
    done: list[int] = []
    (shared,) = share(rig, light, 1)
    rig.enqueue("blas", light)
    rig.stream.after(lambda: done.append(1))
    event = rig.stream.record_deferred()
    assert event is shared
    rig.enqueue("blas", light)
    assert rig.stream.record_deferred() is not shared
    rig.stream.synchronize()
    assert event.is_done
    assert done == [1]


def test_a_loss_ends_what_is_shared(rig: Any, light: MatmulSpec) -> None:
    (shared,) = share(rig, light, 1)
    rig.device.poison("for a test")
    rig.stream.flush()
    assert shared.is_done
    assert isinstance(shared.error, ta.ContextPoisonedError)


class Held:
    """What a task has that looks for the end."""


def test_an_error_does_not_keep_what_the_one_has_who_saw_it(rig: Any) -> None:
    def refuse() -> None:
        raise LibraryError("refused", library="test", code=1)

    rig.stream.after(refuse)
    event = rig.stream.record()

    def look() -> weakref.ref[Held]:
        held = Held()
        while not event.is_done:
            pass
        return weakref.ref(held)

    seen = look()
    assert isinstance(event.error, LibraryError)
    assert seen() is None
