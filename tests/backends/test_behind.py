"""Any operation enqueued after unfinished work returns at once, because the loop would wait with it."""

from __future__ import annotations

import threading

import attrs
import numpy as np
import pytest

from trio_accel import linalg
from trio_accel.backends.base.contract.ops import (
    PHILOX_START,
    CopyFromHostSpec,
    MatmulSpec,
    PhiloxSpec,
)


@attrs.frozen
class Arrays:
    """The arguments of the operations: a plain array, an array with gaps, and results."""

    plain: object
    gaps: object
    out: object
    scalar: object
    row: object
    spaced: object
    odd: object
    single: object


OPERATIONS = {
    "matmul": ("blas", lambda a: MatmulSpec(a.plain, a.plain, a.out)),
    "matmul of what is packed": ("blas", lambda a: MatmulSpec(a.gaps, a.plain, a.out)),
    "gemm": ("blas", lambda a: linalg.gemm.spec(2.0, a.plain, a.plain, 0.5, "T", "N", a.out)),
    "gemm into what is packed": (
        "blas",
        lambda a: linalg.gemm.spec(2.0, a.plain, a.plain, 0.5, "N", "N", a.gaps),
    ),
    "axpy": ("blas", lambda a: linalg.axpy.spec(2.0, a.plain, a.out)),
    "axpy of what is packed": ("blas", lambda a: linalg.axpy.spec(2.0, a.gaps, a.out)),
    "scal": ("blas", lambda a: linalg.scal.spec(2.0, a.out)),
    "dot": ("blas", lambda a: linalg.dot.spec(a.row, a.row, a.scalar)),
    "nrm2": ("blas", lambda a: linalg.nrm2.spec(a.spaced, a.scalar)),
    "uniform": ("random", lambda a: PhiloxSpec("uniform", PHILOX_START.pack(1, 0), 0.0, 2.0, a.out)),
    "normal": ("random", lambda a: PhiloxSpec("normal", PHILOX_START.pack(1, 0), 0.0, 1.0, a.out)),
    "odd normal": ("random", lambda a: PhiloxSpec("normal", PHILOX_START.pack(1, 2), 0.0, 1.0, a.odd)),
    "other type": ("random", lambda a: PhiloxSpec("uniform", PHILOX_START.pack(1, 4), 0.0, 1.0, a.single)),
}


@pytest.mark.parametrize("number", range(len(OPERATIONS)), ids=OPERATIONS)
def test_it_returns_at_once(rig, number):
    library, make = list(OPERATIONS.values())[number]
    rng = np.random.default_rng(number)
    arrays = Arrays(
        plain=rig.put(rng.standard_normal((8, 8))),
        gaps=rig.put_as_laid_out(rng.standard_normal((8, 16))[:, ::2]),
        out=rig.put(rng.standard_normal((8, 8))),
        scalar=rig.put(np.zeros(())),
        row=rig.put(np.ones(8)),
        spaced=rig.put_as_laid_out(rng.standard_normal(16)[::2]),
        odd=rig.put(np.zeros(7)),
        single=rig.put(np.zeros(9, np.float32)),
    )
    spec = make(arrays)
    rig.apply(library, spec)  # the first use is over
    before = [rig.get(array) for array in spec.outputs()]
    hold = rig.stream.hold()
    # If a call waits for the stream, this ends it.
    timer = threading.Timer(10, hold.release)
    timer.start()
    try:
        for _ in range(20):
            rig.enqueue(library, spec)
        assert not rig.stream.record().is_done
    finally:
        timer.cancel()
        hold.release()
        timer.join()
    rig.finish(rig.stream)
    behind = [rig.get(array) for array in spec.outputs()]
    for array, host in zip(spec.outputs(), before, strict=True):
        rig.apply("memory", CopyFromHostSpec(host, array))
    for _ in range(20):
        rig.apply(library, spec)
    for array, host in zip(spec.outputs(), behind, strict=True):
        np.testing.assert_array_equal(rig.get(array), host)
