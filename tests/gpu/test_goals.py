"""The recovery after a fault, and the loop meanwhile, keep their bounds."""

from __future__ import annotations

import pytest
from chosen import BACKEND
from scale import IS_SMALL, scaled

from benchmarks import Plan, Verdict, select, table


@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.skipif(BACKEND != "cuda", reason="it is measured on CUDA devices")
@pytest.mark.parametrize("name", ["cuda.recovery-process", "cuda.lag", "cuda.lag-process"])
async def test_the_bounds_are_kept(name: str) -> None:
    plan = Plan(pairs=scaled(5, 2), warmups=1, scale=scaled(1.0, 0.002), backend=BACKEND)
    (benchmark,) = select([name])
    rows = await benchmark.run(plan)
    print(table(rows))
    allowed = {Verdict.MET, Verdict.NONE, *([Verdict.MISSED] if IS_SMALL else [])}
    assert {row.verdict for row in rows} <= allowed
