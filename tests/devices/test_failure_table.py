"""The table of failures in the guide: each row is run here, or names the test that does.

The rows of methods are in `tests/programs/test_model_errors.py`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from typing import Any

import attrs
import numpy as np
import pytest
import trio
import trio.testing
from chosen import BACKEND, ROOT

import trio_accel as ta
from trio_accel import jit, linalg
from trio_accel.testing import inject_fault

PAGE = ROOT / "docs" / "guide" / "failures.md"
REFUSED = ta.LibraryError("no", library="blas", code=7)
SHARED = 'extern "C" __global__ void none(double *x) { __shared__ double s[1]; s[0] = *x; *x = s[0]; }'
NOT_ON_CPU = jit.Kernel("none", SHARED, parameters={"x": jit.updates("float64")}, grid=1, block=1)


@attrs.frozen
class Arrays:
    """Those of a case.

    Attributes:
        device: The device.
        kept: An array that nothing writes.
        out: The output of the failing operation.
    """

    device: ta.Device
    kept: ta.AccelRef
    out: ta.AccelRef


Ask = Callable[[Arrays], Awaitable[object]]


@attrs.frozen
class Row:
    """A row whose operation runs here.

    Attributes:
        asker: The outcome for the asker.
        ask: The request that fails.
        fault: The injected fault.
        options: Of the device.
        isolations: The isolations of the device.
        damages: Whether the output is damaged, so that its reader gets an error.
        restarts: Of the library's actor.
        loses: Whether it loses the context; inline no array survives that.
    """

    asker: type[Exception]
    ask: Ask
    fault: dict[str, Any] = attrs.field(factory=dict)
    options: dict[str, Any] = attrs.field(factory=dict)
    isolations: tuple[str, ...] = ("process", "inline")
    damages: bool = False
    restarts: int = 0
    loses: bool = False


async def product(arrays: Arrays) -> object:
    return await linalg.matmul(arrays.kept, arrays.kept, out=arrays.out)


async def wrong(arrays: Arrays) -> object:
    return await linalg.matmul(arrays.kept, np.ones((3, 3)))


async def released(arrays: Arrays) -> object:
    array = await arrays.device.put(np.ones(2))
    array.release()
    return await linalg.nrm2(array)


async def missing(arrays: Arrays) -> object:
    return await NOT_ON_CPU(arrays.out)


async def too_large(arrays: Arrays) -> object:
    return await arrays.device.put(np.ones(1 << 18))


async def singular(arrays: Arrays) -> object:
    pending = arrays.device.submit(linalg.solve.message(np.zeros((2, 2)), arrays.kept))
    reader = await error_of(linalg.matmul(pending.value, arrays.kept))
    assert type(reader) is ta.InputFailedError
    assert type(reader.__cause__) is ta.LinAlgError
    return await pending.wait()


ROWS = {
    "A wrong argument": [Row(ValueError, wrong)],
    "An array is released": [Row(ta.StaleRefError, released)],
    "The backend does not support": [Row(ta.NotSupportedError, missing)],
    "Not enough memory": [Row(ta.OutOfMemoryError, too_large, options={"memory_limit": 1 << 20})],
    "The library refuses the launch": [Row(ta.LibraryError, product, {"fail": REFUSED})],
    "The library fails while it runs": [Row(ta.LinAlgError, singular)],
    "Any other exception": [Row(ta.ActorFailedError, product, {"fail": RuntimeError("x")}, restarts=1)],
    "A worker is lost": [
        Row(ta.ContextLostError, product, {"kill": True}, isolations=("process",), damages=True, loses=True),
        Row(
            ta.ContextLostError,
            product,
            {"segfault": True},
            isolations=("process",),
            damages=True,
            loses=True,
        ),
        Row(
            ta.ContextPoisonedError,
            product,
            {"poison": True},
            isolations=("process",),
            damages=True,
            loses=True,
        ),
    ],
    "A context is lost inline": [
        Row(ta.ContextPoisonedError, product, {"poison": True}, isolations=("inline",), loses=True)
    ],
    "An operation hangs, with `stuck_after`": [
        Row(
            ta.CompletionTimeoutError, product, {"hang": True}, {"stuck_after": 0.3}, damages=True, loses=True
        )
    ],
}
# By the beginnings of rows, a module of tests and the test in it.
ELSEWHERE = {
    "A client exceeds": "programs/test_model_errors.py::test_errors_before_a_method_is_called",
    "The mailbox of": "programs/test_model_errors.py::test_errors_before_a_method_is_called",
    "Your [kernel]": "jit/test_refused.py::test_source_that_does_not_compile",
    "Too many submitted": "devices/test_statistics.py::test_senders_wait_for_room_and_are_not_refused",
    "The same, more often": "devices/test_recovery.py::test_too_many_crashes_of_a_library_cost_the_context",
    "An operation hangs, without": (
        "devices/worker/test_cancel_isolated.py::test_a_deadline_holds_on_an_operation_that_hangs"
    ),
    "The launcher": "devices/worker/test_recovery_workers.py::test_the_death_of_the_launcher_is_one_loss",
    "More losses": (
        "devices/worker/test_adoption.py::test_the_next_device_has_the_arrays_by_the_same_references"
    ),
    "The device or the system": (
        "devices/worker/test_cancel_isolated.py::"
        "test_a_closing_device_lets_running_work_finish_within_its_grace"
    ),
    "The caller is cancelled": (
        "devices/worker/test_cancel_isolated.py::test_after_the_grace_the_asker_leaves_and_the_operation_continues"
    ),
    "A signal kills": (
        "devices/worker/test_death_of_the_application.py::test_nothing_is_left_when_the_application_is_killed"
    ),
}
CASES = [
    pytest.param(isolation, row, id=f"{isolation}-{name}-{next(iter(row.fault), 'itself')}")
    for name, rows in ROWS.items()
    for row in rows
    for isolation in row.isolations
]


async def error_of(asked: Awaitable[object]) -> Exception | None:
    try:
        await asked
    except Exception as error:  # noqa: BLE001  # looked at by the test
        return error
    return None


def restarts(system: ta.System, name: str) -> int:
    return sum(node.restarts for node in system.tree().walk() if node.path.endswith(f"/{name}"))


@pytest.mark.skipif(BACKEND != "cpu", reason="the other rows of CUDA are in tests/gpu")
@pytest.mark.parametrize(("isolation", "row"), CASES)
async def test_a_row_is_true(system: ta.System, isolation: ta.Isolation, row: Row) -> None:
    options = ta.DeviceOptions(isolation=isolation, in_flight=1, close_grace=0.2, **row.options)
    async with system.open_device("cpu", options=options) as device:
        arrays = Arrays(device, await device.put(np.eye(2)), await device.put(np.zeros((2, 2))))
        await linalg.matmul(arrays.kept, arrays.kept)
        if row.fault:
            inject_fault(device, linalg.Matmul, **row.fault)
        outcome: list[Exception | None] = []

        async def ask() -> None:
            outcome.append(await error_of(row.ask(arrays)))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await trio.testing.wait_all_tasks_blocked()
            # After it, so queued.
            other = await error_of(linalg.nrm2(arrays.kept[0]))
        (asker,) = outcome
        assert type(asker) is row.asker, asker
        lost_all = row.loses and isolation == "inline"
        assert type(other) is (ta.StaleRefError if lost_all else type(None)), other
        assert device.generation == 1 + row.loses
        if lost_all:
            assert type(await error_of(arrays.kept.to_host())) is ta.StaleRefError
        else:
            np.testing.assert_array_equal(await arrays.kept.to_host(), np.eye(2))
        out = await error_of(arrays.out.to_host())
        assert type(out) is (ta.StaleRefError if lost_all or row.damages else type(None)), out
        if not row.loses:
            assert restarts(system, "blas") == row.restarts


@pytest.mark.skipif(BACKEND != "cpu", reason="reads files")
def test_each_row_has_a_test() -> None:
    table = PAGE.read_text(encoding="utf-8").partition("## The table")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (.+?) \|", table, re.MULTILINE)
    first = [row for row in rows if row != "failure" and not row.startswith("A method ")]
    assert len(first) > 15
    beginnings = [*ROWS, *ELSEWHERE]
    assert [row for row in first if not any(row.startswith(one) for one in beginnings)] == []
    assert [one for one in beginnings if not any(row.startswith(one) for row in first)] == []
    for there in ELSEWHERE.values():
        module, _, name = there.partition("::")
        assert f"def {name}(" in (ROOT / "tests" / module).read_text(encoding="utf-8"), there
