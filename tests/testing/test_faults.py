"""Faults on purpose."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from chosen import NAME

import trio_accel as ta
from trio_accel.testing import inject_fault


class OddError(Exception):
    """An error that cannot be made again from its `args`."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__("odd")
        self.both = (first, second)


async def test_so_many_launches_fail_and_no_more(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    fault = inject_fault(device, ta.linalg.Nrm2, fail=ta.LibraryError("no", library="blas", code=7), count=2)
    seen: list[ta.LibraryError] = []
    for _ in range(2):
        with pytest.raises(ta.LibraryError, match="no") as caught:
            await ta.linalg.nrm2(x)
        seen.append(caught.value)
    assert await (await ta.linalg.nrm2(x)).item() == pytest.approx(3**0.5, rel=1e-12)
    assert (fault.hit, fault.remaining) == (2, 0)
    assert seen[0] is not seen[1]
    assert {(error.library, error.code, error.operation) for error in seen} == {("blas", 7, "linalg.Nrm2")}
    assert fault._plan not in device.state.faults


async def test_other_operations_are_unaffected(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    fault = inject_fault(device, ta.linalg.Nrm2, fail=RuntimeError("broken"))
    await ta.linalg.scal(2.0, x)
    await x.to_host()
    assert fault.hit == 0
    fault.remove()
    fault.remove()
    assert await (await ta.linalg.nrm2(x)).item() == pytest.approx(12**0.5, rel=1e-12)


async def test_two_faults_on_one_operation(device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    first = inject_fault(device, ta.linalg.Nrm2, fail=ta.LibraryError("first", library="blas", code=1))
    second = inject_fault(device, ta.linalg.Nrm2, fail=ta.LibraryError("second", library="blas", code=2))
    with pytest.raises(ta.LibraryError, match="first"):
        await ta.linalg.nrm2(x)
    assert (first.hit, second.hit) == (1, 0)
    with pytest.raises(ta.LibraryError, match="second"):
        await ta.linalg.nrm2(x)
    assert (first.hit, second.hit) == (1, 1)
    await ta.linalg.nrm2(x)


@pytest.mark.parametrize(
    "error",
    [
        ta.OutOfMemoryError("full", requested=10, free=1, total=5),
        ta.LibraryError("no", library="blas", code="EXECUTION_FAILED"),
        ta.NotSupportedError("not here", backend="cpu"),
        ta.DriverError("odd", code=700),
        ta.ContextPoisonedError("gone"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_errors_of_devices_keep_their_fields(device: ta.Device, error: ta.AccelError) -> None:
    x = await device.put(np.ones(3))
    inject_fault(device, ta.linalg.Nrm2, fail=error)
    with pytest.raises((type(error), ta.ActorFailedError)) as caught:
        await ta.linalg.nrm2(x)
    raised: Any = caught.value
    if isinstance(raised, ta.ActorFailedError):  # a class that makes the library suspect
        raised = raised.__cause__
    if isinstance(raised, ta.ContextLostError) and device.isolation == "process":
        raised = raised.__cause__  # the cause of a worker's lost context
    assert type(raised) is type(error)
    assert raised is not error
    # A refusal is made in the name of the function; the text of a failure is unchanged.
    head = "linalg.nrm2: " if isinstance(error, ta.NotSupportedError) else ""
    assert raised.message == f"{head}{error.message}"
    for field in ("requested", "free", "total", "library", "code", "backend"):
        assert getattr(raised, field, None) == getattr(error, field, None)
    assert raised.operation == "linalg.Nrm2"
    assert error.operation is None  # the given one is unchanged


async def test_a_crash_is_a_crash(system: ta.System, device: ta.Device) -> None:
    x = await device.put(np.ones(3))
    inject_fault(device, ta.linalg.Nrm2, fail=RuntimeError("broken handle"))
    with pytest.raises(ta.ActorFailedError, match=r"linalg\.nrm2 .*RuntimeError: broken handle"):
        await ta.linalg.nrm2(x)
    await ta.linalg.nrm2(x)
    assert system.tree().find(f"test/{NAME}/context/blas").restarts == 1


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"count": 0}, ValueError, "count must be an integer of at least 1, got 0"),
        ({"count": True}, ValueError, "count must be an integer of at least 1, got True"),
        ({"count": 1.5}, ValueError, "count must be an integer of at least 1, got 1.5"),
        ({"fail": "broken"}, TypeError, "fail must be an exception, got 'broken'"),
        ({"fail": RuntimeError}, TypeError, "fail must be an exception, got <class 'RuntimeError'>"),
        ({"fail": OddError(1, 2)}, TypeError, "fail must be an exception that can be copied, got OddError"),
        ({"how": "trap"}, ValueError, "how must be left out with fail, got 'trap'"),
        (
            {"fail": None, "hang": True, "how": "trap"},
            ValueError,
            "how must be 'kernel' or 'writing' with hang",
        ),
        ({"fail": None, "kill": True, "how": "gently"}, ValueError, "how must be 'writing' with kill, got"),
        ({"operation": "Nrm2"}, TypeError, "operation must be a message class .*, got 'Nrm2'"),
        ({"operation": ta.linalg.nrm2}, TypeError, "operation must be a message class"),
    ],
)
async def test_wrong_arguments(
    device: ta.Device, options: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {"operation": ta.linalg.Nrm2, "fail": RuntimeError("broken"), **options}
    with pytest.raises(error, match=f"inject_fault: {message}"):
        inject_fault(device, arguments.pop("operation"), **arguments)
    assert device.state.faults.take("linalg.Nrm2") is None
