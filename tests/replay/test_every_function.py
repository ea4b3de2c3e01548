"""Each function in the table of operations is recorded, and a replay of it has the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import pytest
import scipy.sparse
from chosen import BACKEND, IS_STAND_IN
from operations_table import public_functions
from random_work import replayed
from test_refusals import FUNCTIONS, Surroundings, call

import trio_accel as ta
from trio_accel import replay
from trio_accel.backends.base import Isolation

# They need what no sample of an argument's name is: the result of another function, and a fresh sequence.
WITHOUT_SAMPLES = {"signal.evaluate_spline", "random.Sobol.random_base2"}
ISOLATIONS: dict[str, Isolation] = {"linalg": "process", "sparse": "process"}
PACKAGES = sorted({name.partition(".")[0] for name in FUNCTIONS})


def test_the_table_has_samples() -> None:
    assert len(public_functions()) > 500
    assert set(public_functions()) <= FUNCTIONS.keys() - WITHOUT_SAMPLES


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.skipif(IS_STAND_IN, reason="it has a part of the kernels")
async def test_a_replay_of_every_function(system: ta.System, package: str) -> None:
    names = [name for name in FUNCTIONS.keys() - WITHOUT_SAMPLES if name.partition(".")[0] == package]
    journal, asked, read = replay.MemoryJournal(), set[str](), 0
    async with system.open_device(BACKEND) as device:
        there = Surroundings(device)
        for name in sorted(names):
            # This makes the arrays that it needs, so that they are no operations of the recording.
            await call(name, there, **await others(name, there))
        async with replay.record(device, journal) as recording:
            for name in sorted(names):
                more = await others(name, there)
                before = recording.operations
                reply = await call(name, there, **more)
                if recording.operations > before:
                    asked.add(name)
                for ref in arrays_of(reply):
                    await ref.to_host()
                    read += 1
    of_table = {name for name in public_functions() if name.partition(".")[0] == package}
    assert not of_table - asked
    assert read >= len(asked) // 2
    report = await replayed(system, journal, ISOLATIONS.get(package, "inline"))
    assert report.is_same, report
    assert not report.skipped, report
    assert report.compared >= read


async def others(name: str, there: Surroundings) -> dict[str, Any]:
    """Return arguments with which a function computes, where its samples need no operation."""
    if name == "arrays.reshape":
        return {"x": (await there("PLANE")).T, "shape": (16,)}
    if name == "sparse.tocsr":
        return {"matrix": await ta.sparse.csc(await there("DEVICE"), scipy.sparse.eye_array(4).tocsc())}
    return {}


def arrays_of(reply: object) -> Iterator[ta.AccelRef]:
    """Yield the arrays of a result, and of its fields."""
    if isinstance(reply, ta.AccelRef):
        yield reply
    elif isinstance(reply, (tuple, list)):
        items: Any = reply
        for item in items:
            yield from arrays_of(item)
    elif attrs.has(cls := type(reply)):
        for field in attrs.fields(cls):
            yield from arrays_of(getattr(reply, field.name))
