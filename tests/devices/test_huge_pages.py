"""What every request runs through, in huge pages."""

from __future__ import annotations

import ctypes
import mmap
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

import trio_accel as ta
from trio_accel.devices import _huge_pages
from trio_accel.devices._completion import uses_huge_pages
from trio_accel.devices._engine import Engine
from trio_accel.devices._huge_pages import HugePages, gather

SIZE = 2 << 20
COLLAPSE = 25

Asked = list[tuple[int, int, int]]


class Library:
    """A C library whose `madvise` takes note of what it is asked for, and refuses the first."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked

    @property
    def madvise(self) -> Callable[[int, int, int], int]:
        return ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)(self._madvise)

    def _madvise(self, address: int, size: int, advice: int) -> int:
        self.asked.append((address, size, advice))
        return -1 if len(self.asked) == 1 else 0


@pytest.fixture
def settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the system says of huge pages, which a test may change."""
    (tmp_path / "enabled").write_text("always [madvise] never\n")
    (tmp_path / "hpage_pmd_size").write_text(f"{SIZE}\n")
    monkeypatch.setattr(_huge_pages, "_SYSTEM", tmp_path)
    monkeypatch.setattr(sys, "platform", "linux")
    return tmp_path


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """What the C library is asked for."""
    asked: Asked = []
    monkeypatch.setattr(ctypes, "CDLL", lambda _: Library(asked))
    return asked


@pytest.mark.usefixtures("settings")
def test_whole_pages_that_hold_what_a_request_runs_through_are_gathered(asked: Asked) -> None:
    held = gather()
    # One was refused.
    assert held == len(asked) - 1 > 0
    assert {(size, advice) for _, size, advice in asked} == {(SIZE, COLLAPSE)}
    places = [address for address, _, _ in asked]
    assert places == sorted(set(places))
    assert not any(address % SIZE for address in places)
    for item in (Engine, Engine.enqueue, Engine.enqueue.__code__, ta.linalg.matmul.__code__, trio.sleep):
        assert id(item) // SIZE * SIZE in places


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("enabled", "always madvise [never]\n"),
        # 64 KiB pages make huge ones of half a gigabyte.
        ("hpage_pmd_size", f"{512 << 20}\n"),
        ("hpage_pmd_size", "?\n"),
    ],
)
def test_where_there_are_to_be_none_nothing_is_asked_for(
    name: str, content: str, settings: Path, asked: Asked
) -> None:
    (settings / name).write_text(content)
    assert gather() == 0
    assert asked == []


def test_a_system_that_says_nothing_has_none(settings: Path, asked: Asked) -> None:
    (settings / "enabled").unlink()
    assert gather() == 0
    assert asked == []


def test_other_systems_have_none(asked: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert gather() == 0
    assert asked == []


_HELD = """
from trio_accel.devices._huge_pages import gather

def held():
    with open("/proc/self/smaps_rollup") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith("AnonHugePages:"))

before = held()
count = gather()
print(count, before, held())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's own account")
def test_the_kernel_says_the_same() -> None:
    if not _can_collapse():
        pytest.skip("this kernel makes no huge pages of plain ones")
    done = subprocess.run([sys.executable, "-c", _HELD], capture_output=True, text=True, check=True)
    count, before, after = map(int, done.stdout.split())
    # What was huge by itself counts, too.
    assert count > 0
    assert after - before <= count * SIZE // 1024 <= after


def _can_collapse() -> bool:
    try:
        size = _huge_pages._huge()
        memory = mmap.mmap(-1, 2 * SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.write(b"1" * 2 * SIZE)
        # A whole huge page lies somewhere in it.
        place = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        libc = ctypes.CDLL(None)
        libc.madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
        return size == SIZE and libc.madvise(-(-place // SIZE) * SIZE, SIZE, COLLAPSE) == 0
    except (OSError, ValueError):
        return False


async def test_it_is_done_a_second_after_something_was_loaded(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    times: list[float] = []
    start = trio.current_time()

    async def in_thread(function: Callable[[], int], *, abandon_on_cancel: bool) -> None:
        assert function is gather
        assert abandon_on_cancel
        times.append(trio.current_time() - start)
        await trio.sleep(0.25)

    monkeypatch.setattr(trio.to_thread, "run_sync", in_thread)
    pages = HugePages()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(pages.run)
        await trio.sleep(0.5)
        # They go together.
        pages.loaded()
        await trio.sleep(9.5)
        assert times == [1.0]
        pages.loaded()
        pages.loaded()
        # While it is done, too.
        await trio.sleep(1.125)
        pages.loaded()
        await trio.sleep(8.875)
        assert times == [1.0, 11.0, 12.25]
        nursery.cancel_scope.cancel()


async def test_only_who_stays_awake_wants_them(device: ta.Device) -> None:
    info = device.info
    assert uses_huge_pages(ta.AdaptiveCompletion(), info)
    assert not uses_huge_pages(ta.AdaptiveCompletion(huge_pages=False), info)
    assert not uses_huge_pages(ta.HostCallbackCompletion(), info)
    assert uses_huge_pages(None, info) == (info.completion == "adaptive")


def test_it_is_yes_or_no() -> None:
    wrong: Any = 1
    with pytest.raises(TypeError, match="AdaptiveCompletion: huge_pages must be True or False, got 1"):
        ta.AdaptiveCompletion(huge_pages=wrong)
