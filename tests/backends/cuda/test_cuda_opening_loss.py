"""A worker with a context lost before it has served: another one follows, as after any loss."""

from __future__ import annotations

from pathlib import Path

import pytest

pytestmark = pytest.mark.no_device

PROGRAM = """
import os
from pathlib import Path
import numpy as np
import trio
import trio_accel as ta
from trio_accel.devices import Copy

lost = Path(os.environ["STAND_IN_LOST"])


async def main():
    options = ta.DeviceOptions(intensity=ta.Intensity(3, 60.0))
    async with ta.open_system("s") as system, system.open_device("cuda", options=options) as device:
        x = await device.put(np.arange(3.0))
        lost.touch()
        ta.testing.inject_fault(device, Copy, kill=True)
        with trio.fail_after(20):
            try:
                await x.copy()
            except ta.ContextLostError:
                print((await x.to_host()).tolist(), lost.exists(), device.generation)


trio.run(main)
"""


@pytest.mark.slow
def test_a_worker_that_finds_its_context_lost_is_followed_by_another(run_on_stand_in, tmp_path: Path) -> None:
    said = run_on_stand_in(PROGRAM, STAND_IN_LOST=str(tmp_path / "lost"))
    assert said == "[0.0, 1.0, 2.0] False 2\n"
