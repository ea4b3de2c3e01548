"""Libraries that cannot be opened: the requests that fail, and the state of the device."""

from __future__ import annotations

from collections.abc import AsyncGenerator

import numpy as np
import pytest
from manual_backend import ManualBackend

import trio_accel as ta


@pytest.fixture
async def manual(system: ta.System, backend: ManualBackend) -> AsyncGenerator[ta.Device, None]:
    """A device that comes back without a back-off."""
    options = ta.DeviceOptions(backoff=ta.Backoff(base=0.0))
    async with system.open_device(options=options) as device:
        yield device


async def test_a_library_that_cannot_be_opened_is_the_askers_problem(
    system: ta.System, manual: ta.Device, backend: ManualBackend
) -> None:
    x = await manual.put(np.ones(2))
    backend.device.refuse_library = ta.NotSupportedError("no such library here", backend="manual")
    with pytest.raises(ta.NotSupportedError, match="no such library here"):
        await ta.linalg.nrm2(x)
    backend.device.refuse_library = None
    assert await (await ta.linalg.dot(x, x)).item() == 2.0
    assert manual.generation == 1
    assert system.tree().find("test/manual:0/context").restarts == 0


async def test_submissions_to_a_library_that_finds_the_context_lost(
    manual: ta.Device, backend: ManualBackend
) -> None:
    backend.device.refuse_library = ta.ContextPoisonedError("an illegal address")
    first = manual.submit(ta.linalg.Nrm2(np.ones(4)))
    other = manual.submit(ta.fft.Fft(np.ones(4, complex)))
    with pytest.raises(ta.ContextPoisonedError, match="its library to be opened; ask again") as caught:
        await first.wait()
    assert (caught.value.operation, caught.value.generation) == ("linalg.Nrm2", 1)
    with pytest.raises(ta.ContextLostError, match="submit it again"):
        await other.wait()
    assert await (await manual.ask(ta.linalg.Nrm2(np.ones(4)))).item() == 2.0


async def test_a_library_that_cannot_be_opened_leaves_a_fault_for_the_next(
    manual: ta.Device, backend: ManualBackend
) -> None:
    refusal = ta.LibraryError("no", library="blas", code=7)
    fault = ta.testing.inject_fault(manual, ta.linalg.Nrm2, fail=refusal)
    backend.device.refuse_library = ta.NotSupportedError("no such library here", backend="manual")
    with pytest.raises(ta.NotSupportedError):
        await manual.ask(ta.linalg.Nrm2(np.ones(4)))
    assert (fault.hit, fault.remaining) == (0, 1)
    backend.device.refuse_library = None
    with pytest.raises(ta.LibraryError, match="no"):
        await manual.ask(ta.linalg.Nrm2(np.ones(4)))
    assert (fault.hit, fault.remaining) == (1, 0)
