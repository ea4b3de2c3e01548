"""The benchmark of large work, where measurements are disturbed; its numbers mean nothing here."""

from __future__ import annotations

import itertools

import pytest
from chosen import BACKEND

from benchmarks import Plan, cuda_bandwidth
from benchmarks._processors import Processors

pytestmark = pytest.mark.stand_in


@pytest.mark.skipif(BACKEND != "cuda", reason="it is measured on CUDA devices")
@pytest.mark.skipif(not Processors.are_told(), reason="this system does not tell of processors")
async def test_the_first_of_a_row_belongs_to_a_pair_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    # After each pair that counts, two pairs are disturbed: one of them only its peer.
    looks = itertools.cycle([True, True, False, True, False])
    monkeypatch.setattr(Processors, "were_good", lambda *_: next(looks))
    monkeypatch.setattr(Processors, "choose", lambda _: None)
    works = [work for work in cuda_bandwidth._works(Plan(scale=0.001)) if work.name == "put"]
    monkeypatch.setattr(cuda_bandwidth, "_works", lambda _: works)
    benchmark = next(each for each in cuda_bandwidth.BENCHMARKS if each.isolation == "inline")
    plan = Plan(pairs=3, warmups=1, scale=0.001, backend="cuda", patience=60.0)
    many, single, first = await benchmark.measure(plan)
    assert (single.retaken, first.retaken, many.retaken) == (4, 4, 0)
    for summary in (single.ours, single.peer, first.ours, first.peer):
        assert summary is not None
        assert summary.count == 3
