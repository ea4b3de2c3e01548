"""A small call of the BLAS has one thread, and its bits do not depend on concurrent calls."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np
import pytest

from trio_accel.backends.cpu.runtime.blas_threads import BOUND, BlasThreads, find_number, matrix_product

pytestmark = [pytest.mark.no_device, pytest.mark.machine]

ROOT = Path(__file__).parents[4]
PATIENCE = 30
LARGE = BOUND + 1
Run: TypeAlias = Callable[[str], Any]


class Caller(threading.Thread):
    """A thread that calls a BLAS, and stays inside until it is let go.

    Attributes:
        entered: Set when it is inside.
        seen: The number of threads that its call found.
    """

    def __init__(self, threads: BlasThreads, number: ctypes.c_int, work: int) -> None:
        super().__init__()
        self.entered, self._may_leave = threading.Event(), threading.Event()
        self.seen = 0
        self._threads, self._number, self._work = threads, number, work
        self.start()

    def run(self) -> None:
        with self._threads.for_work(self._work):
            self.seen = self._number.value
            self.entered.set()
            assert self._may_leave.wait(PATIENCE)

    def inside(self) -> Caller:
        assert self.entered.wait(PATIENCE)
        return self

    def leave(self) -> None:
        self._may_leave.set()
        self.join()


class Watched(threading.Condition):
    """A condition that reports when somebody waits for it."""

    def __init__(self, lock: threading.Lock) -> None:
        super().__init__(lock)
        self.is_waited_for = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.is_waited_for.set()
        return super().wait(timeout)


@pytest.mark.parametrize(("work", "seen"), [(0, 1), (BOUND, 1), (LARGE, 6)])
def test_a_small_call_has_one_thread_and_a_large_call_has_all(work: int, seen: int) -> None:
    number = ctypes.c_int(6)
    threads = BlasThreads(number)
    with threads.for_work(work):
        assert number.value == seen
    assert number.value == 6


def test_the_number_comes_back_after_an_error() -> None:
    number = ctypes.c_int(6)
    threads = BlasThreads(number)
    with pytest.raises(ZeroDivisionError), threads.for_work(1):
        raise ZeroDivisionError
    assert number.value == 6
    with threads.for_work(LARGE):
        assert number.value == 6


def test_a_number_that_the_program_has_set_since_is_not_raised() -> None:
    number = ctypes.c_int(6)
    threads = BlasThreads(number)
    number.value = 2
    for work in (1, LARGE):
        with threads.for_work(work):
            assert number.value <= 2
        assert number.value == 2


@pytest.mark.parametrize(("work", "seen"), [(BOUND, 1), (LARGE, 6)])
def test_calls_of_one_kind_are_inside_together(work: int, seen: int) -> None:
    number = ctypes.c_int(6)
    threads = BlasThreads(number)
    first, second = (Caller(threads, number, work).inside() for _ in range(2))
    first.leave()
    assert number.value == seen
    second.leave()
    assert (first.seen, second.seen, number.value) == (seen, seen, 6)


@pytest.mark.parametrize(("works", "seen"), [((BOUND, LARGE), (1, 6)), ((LARGE, BOUND), (6, 1))])
def test_a_call_waits_for_calls_of_the_other_kind_and_none_passes_it(
    works: tuple[int, int], seen: tuple[int, int]
) -> None:
    number = ctypes.c_int(6)
    threads = BlasThreads(number)
    threads._left = left = Watched(threads._lock)  # pyright: ignore[reportPrivateUsage]
    first = Caller(threads, number, works[0]).inside()
    other = Caller(threads, number, works[1])
    assert left.is_waited_for.wait(PATIENCE)
    # It could join the first one at once.
    late = Caller(threads, number, works[0])
    assert not other.entered.is_set()
    first.leave()
    other.inside()
    assert not late.entered.is_set()
    assert number.value == seen[1]
    other.leave()
    late.inside().leave()
    assert (first.seen, other.seen, late.seen, number.value) == (seen[0], seen[1], seen[0], 6)


PRODUCTS = """
import json
import numpy as np
from trio_accel.backends.cpu.runtime import blas_threads

number, rng, found = blas_threads.find_number(np), np.random.default_rng(0), []
for turn in range(400):
    while True:
        m, k, n = np.exp(rng.uniform(0.0, 7.0, 3)).astype(int) + 2
        if max(m * k * max(n, 8), k * n * max(m, 8)) <= blas_threads.MAX_SINGLE_THREAD_PRODUCT:
            break
    dtype = (np.float32, np.float64)[turn % 2]
    a = rng.standard_normal((m, k)).astype(dtype)
    b = np.asarray(rng.standard_normal((k, n)), dtype, order="CF"[turn // 2 % 2])
    bits = []
    for number.value in (1, 2):
        bits.append((a @ b).tobytes())
    found.append(bits[0] == bits[1])
print(json.dumps([len(found), all(found)]))
"""


def test_an_uncounted_product_has_the_same_bits_with_any_number_of_threads(
    run_two_threads: Run,
) -> None:
    assert run_two_threads(PRODUCTS) == [400, True]


def test_a_product_by_its_own_transpose_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """NumPy computes it by another routine, with bits that may depend on the number of threads."""
    a = np.random.default_rng(0).standard_normal((40, 12)).astype(np.float32)
    counted: list[int] = []

    class Counting:
        enter = staticmethod(counted.append)
        leave = staticmethod(lambda: None)

    monkeypatch.setattr("trio_accel.backends.cpu.runtime.blas_threads.NUMPY", Counting)
    matrix_product(a, a.T.copy())
    assert not counted
    np.testing.assert_allclose(
        matrix_product(a, a.T), a.astype(float) @ a.T.astype(float), rtol=1e-4, atol=1e-5
    )
    assert len(counted) == 1


@pytest.fixture
def run_two_threads() -> Run:
    """Run a program with copies of OpenBLAS started with two threads; returns its output."""

    def run(program: str) -> Any:
        done = subprocess.run(
            [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program],
            env={**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "2"},
            stdout=subprocess.PIPE,
            check=True,
            timeout=120,
        )
        return json.loads(done.stdout)

    return run


def test_without_such_a_library_nothing_is_done(tmp_path: Path) -> None:
    package = ModuleType("package")
    package.__path__ = [str(tmp_path / "package")]
    libraries = tmp_path / "package.libs"
    libraries.mkdir()
    for content in (None, b"no library"):
        if content is not None:
            (libraries / "libopenblas.so").write_bytes(content)
        threads = BlasThreads(find_number(package))
        with threads.for_work(1), threads.for_work(LARGE):
            # Both at once: neither waits.
            assert find_number(package).value == 1


# A fork has no BLAS thread before one is needed (D97). The names of operations are those in `ta.linalg` and
# `ta.nn`.
FORKS = """
import importlib, json, os, threading
import numpy as np, trio
import trio_accel as ta
from trio_accel.backends.cpu import CpuBackend
for module in CpuBackend().preload:
    importlib.import_module(module)

rng = np.random.default_rng(0)
def normal(*shape): return rng.standard_normal(shape)
def definite(n): return np.tril(normal(n, n)) + np.tril(normal(n, n)).T + 4 * n * np.eye(n)
def small():
    few, a, vector = normal(8, 512), normal(512, 512), normal(300_000)
    return {
        "matmul": (few, a), "einsum": ("ij,jk->ki", few, a), "gemm": (1.0, few, a),
        "trsm": (1.0, definite(128), normal(128, 128)),
        "syrk": (1.0, normal(160, 150), 0.0, normal(160, 160)),
        "dot": (vector, vector), "nrm2": (vector,), "axpy": (0.5, vector, vector),
        "cholesky": (definite(192),), "solve": (definite(192), normal(192, 192)), "qr": (normal(192, 192),),
        "eigh": (definite(192),), "svd": (normal(160, 160),), "sqrtm": (definite(128),),
        "conv2d": (normal(1, 8, 30, 30), normal(24, 8, 3, 3)),
        "scaled_dot_product_attention": (normal(1, 2, 96, 64),) * 3,
    }
def large():
    return {
        "matmul": (normal(600, 600),) * 2, "gemm": (1.0, *(normal(600, 600),) * 2),
        "dot": (normal(2_000_000),) * 2, "cholesky": (definite(600),),
    }
async def main(calls):
    found = {}
    async with ta.open_system("threads") as system:
        device = await system.open_device("cpu", options=ta.DeviceOptions(isolation="inline"))
        for name, given in calls.items():
            put = [await device.put(one) if isinstance(one, np.ndarray) else one for one in given]
            made = await getattr(ta.linalg if hasattr(ta.linalg, name) else ta.nn, name)(*put)
            if isinstance(made, ta.AccelRef):
                await made.to_host()
            found[name] = len(os.listdir("/proc/self/task")) - threading.active_count()
    return found
found = []
for calls in (small(), *({name: given} for name, given in large().items())):
    end, other = os.pipe()
    if not os.fork():
        os.write(other, json.dumps(trio.run(main, calls)).encode())
        os._exit(0)
    os.close(other)
    with open(end, "rb") as pipe:
        found.append(json.loads(pipe.read() or "null"))
    os.wait()
print(json.dumps(found))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="a BLAS has one thread on one core")
def test_the_librarys_own_threads_start_with_the_first_large_call(run_two_threads: Run) -> None:
    small, *large = run_two_threads(FORKS)
    assert small == dict.fromkeys(small, 0)
    assert large == [{name: 1} for name in ("matmul", "gemm", "dot", "cholesky")]


# Results that differ by the number of threads, on the processors that the figures are of.
BESIDE = """
import json, threading
import numpy as np
from trio_accel.backends.cpu.runtime.blas_threads import matrix_product

rng = np.random.default_rng(0)
def product(*shape):
    a, b = (rng.standard_normal(sides).astype("c8") for sides in (shape[:2], shape[1:]))
    return lambda: matrix_product(a, b).tobytes()
small = [product(*shape) for shape in ((8, 512, 512), (113, 34, 360), (18, 547, 90))]
large = product(300, 301, 302)
alone = [one() for one in small]
found = [{large()} for _ in range(2)]
def run(seen):
    for _ in range(20):
        seen.add(large())
threads = [threading.Thread(target=run, args=(seen,)) for seen in found]
for thread in threads:
    thread.start()
is_same = all([[one() for one in small] == alone for _ in range(20)])
for thread in threads:
    thread.join()
print(json.dumps([is_same, len(set.union(*found))]))
"""


def test_a_call_has_the_same_bits_next_to_calls_of_another_size(run_two_threads: Run) -> None:
    assert run_two_threads(BESIDE) == [True, 1]


FORK = """
import ctypes, json, os, threading
from trio_accel.backends.cpu.runtime.blas_threads import BOUND, BlasThreads

number = ctypes.c_int(6)
threads = BlasThreads(number)
entered, may_leave = threading.Event(), threading.Event()
def stay():
    with threads.for_work(1):
        entered.set()
        may_leave.wait()
other = threading.Thread(target=stay)
other.start()
entered.wait()
if not os.fork():
    with threads.for_work(BOUND + 1):
        os._exit(number.value)
_, status = os.wait()
may_leave.set()
other.join()
print(json.dumps([os.waitstatus_to_exitcode(status), number.value]))
"""


def test_a_fork_begins_with_nobody_inside(run_two_threads: Run) -> None:
    assert run_two_threads(FORK) == [6, 6]
