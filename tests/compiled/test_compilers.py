"""Broken compilers and caches, and the leftovers of a compilation in a killed process."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from both_executors import Executors
from chosen import ROOT, SEARCHED

import trio_accel as ta
from trio_accel import jit
from trio_accel.backends.base import DType
from trio_accel.backends.base.expressions import Argument, encode_program, parse, typed
from trio_accel.backends.base.kit.code_cache import CompiledCode, default_code_cache, remove_stale
from trio_accel.backends.cpu.compiled import _compiler
from trio_accel.backends.cpu.compiled._loops import text_of
from trio_accel.backends.cpu.compiled._text import LoopLayout
from trio_accel.backends.cpu.runtime._stream import CpuStream

pytestmark = [pytest.mark.no_device, pytest.mark.one_backend]

SOURCE = 'extern "C" __global__ void k() {}'
BROKEN = {
    "fails": ("echo no >&2; exit 1", "it ended with 1: no"),
    "hangs": ("sleep 60", "it takes longer than 0.3 s"),
    "makes nothing": ("exit 0", "made.so"),
    "writes nonsense": ('while [ "$1" != -o ]; do shift; done; echo nonsense >"$2"', "file too short"),
    "dies": ("kill -9 $$", "it ended with 137"),
}


def compiler_that(does: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have `CXX` name a script that prints a version, and does something else when it should compile."""
    script = folder / "compiler"
    script.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo broken 1.0 && exit\n{does}\n')
    script.chmod(0o700)
    monkeypatch.setenv("CXX", str(script))


def one_text() -> str:
    ask = "x * 3.0 + 1.0"
    layout = LoopLayout(1, ("dense", "dense"))
    program = encode_program(typed(parse(ask), (DType.float64,)), (Argument(DType.float64, True),))
    return text_of(program, layout)


@pytest.mark.parametrize("name", BROKEN)
async def test_a_broken_compiler(
    executors: Executors, fresh: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    does, told = BROKEN[name]
    compiler_that(does, fresh, executors.monkeypatch)
    executors.monkeypatch.setattr(_compiler, "_LIMIT", 0.3)
    executors.monkeypatch.setattr(tempfile, "tempdir", str(fresh))
    executors.choose("always")
    x, calls = np.arange(9.0), list[object]()
    compiled = _compiler.Compiler.compile

    def counted(*arguments: Any, **named: Any) -> bytes:
        calls.append(arguments)
        return compiled(*arguments, **named)

    executors.monkeypatch.setattr(_compiler.Compiler, "compile", counted)
    given = await executors.device.put(x)
    with caplog.at_level(logging.WARNING, "trio_accel.backends"):
        for number in range(6):
            made = await jit.elementwise(f"x + {number}.5", inputs=("x",))(given)
            np.testing.assert_array_equal(await made.to_host(), x + number + 0.5)
    (record,) = caplog.records
    assert told in record.getMessage()
    assert "computed by NumPy instead" in record.getMessage()
    # A compiler that fails three times in a row is not asked again, nor is a compiler that has hung once.
    assert len(calls) == (1 if name == "hangs" else 3)
    assert os.listdir(fresh) == ["compiler"], "files are left"


async def test_no_room_for_the_compiler(
    executors: Executors, fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executors.monkeypatch.setattr(tempfile, "tempdir", str(fresh / "nowhere"))
    executors.choose("always")
    made = await jit.elementwise("x * 2", inputs=("x",))(await executors.device.put(np.arange(3.0)))
    np.testing.assert_array_equal(await made.to_host(), [0, 2, 4])
    assert len(caplog.records) == 1


async def test_a_cache_that_cannot_be_written_to(
    executors: Executors, fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (fresh / "cache").write_text("a file where the folder was to be")
    await executors.compare(jit.elementwise("x * 2", inputs=("x",)), np.arange(3.0))
    (record,) = caplog.records
    assert "the cache of compiled kernels" in record.getMessage()


async def test_without_a_compiler(
    executors: Executors, fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    executors.monkeypatch.setenv("CXX", "no-such-compiler --fast")
    executors.monkeypatch.setenv("PATH", str(fresh))
    executors.choose("always")
    assert _compiler.compiler() is None
    made = await jit.elementwise("x * 2", inputs=("x",))(await executors.device.put(np.arange(3.0)))
    np.testing.assert_array_equal(await made.to_host(), [0, 2, 4])
    with pytest.raises(ta.NotSupportedError, match="where there is a C\\+\\+ compiler, and there is none"):
        await executors.device.ask(jit.Kernel("k", SOURCE, parameters={}, grid=1, block=1).launch())
    assert not caplog.records


def test_code_is_found_again_and_only_that_of_this_machine(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    compiled = _compiler.Compiler.compile

    def counted(found: _compiler.Compiler, text: str, *more: Any) -> bytes:
        calls.append(text)
        return compiled(found, text, *more)

    monkeypatch.setattr(_compiler.Compiler, "compile", counted)

    def times() -> int:
        """Compile in a process with nothing loaded, and return how often the compiler ran by now."""
        monkeypatch.setattr(_compiler, "_state", _compiler.State())
        assert _compiler.compile_text(one_text()) is not None
        return len(calls)

    assert [times(), times()] == [1, 1]
    found = _compiler.compiler()
    assert found is not None
    cache, key = default_code_cache(), found.key(one_text())
    entry = fresh / "cache" / key.hex()
    entry.write_bytes(entry.read_bytes()[:-100])
    assert times() == 2, "an entry that is cut off is a miss"
    cache.store(key, CompiledCode(b"no library"))
    assert times() == 3, "what is not a library is a miss"
    assert times() == 3
    monkeypatch.setattr(_compiler, "machine", lambda: ("x86_64", "glibc 2.36", "flags: another machine's"))
    assert times() == 4, "code of another machine in a shared folder is a miss"
    text = one_text()
    changed: list[dict[str, Any]] = [{"version": "another"}, {"options": ()}, {"command": ("other",)}]
    keys = [found.key(text, *more) for more in ((), (("-DX",),), ((), ("header",)))]
    keys += [attrs.evolve(found, **one).key(text) for one in changed] + [found.key(f"{text} "), key]
    assert len({*keys}) == len(keys)


def test_libraries_are_not_taken_for_one_another(fresh: Path) -> None:
    found = _compiler.compiler()
    assert found is not None
    exported = 'extern "C" __attribute__((visibility("default"))) long long'
    texts = [f"{exported} run(const char *, long long a, long long) {{ return a + {n}; }}" for n in range(3)]
    entries = [_compiler.load(found.compile(text)) for text in texts]
    assert [entry(b"", 10, 0) for entry in entries] == [10, 11, 12]


@pytest.mark.parametrize("isolation", ["inline", "process"])
async def test_waiting_for_a_compiler_does_not_count_as_stuck(
    fresh: Path, monkeypatch: pytest.MonkeyPatch, isolation: ta.Isolation
) -> None:
    compiler_that("sleep 1; exit 1", fresh, monkeypatch)
    monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", "always")
    options = ta.DeviceOptions(isolation=isolation, stuck_after=0.3)
    async with ta.open_system("slow") as system, system.open_device("cpu", options=options) as device:
        given, begun = await device.put(np.arange(9.0)), time.monotonic()
        made = await jit.elementwise("x * 7.25 + 1", inputs=("x",))(given)
        assert time.monotonic() - begun > 0.9
        np.testing.assert_array_equal(await made.to_host(), np.arange(9.0) * 7.25 + 1)
        assert device.generation == 1


async def test_a_compiler_without_a_version(
    executors: Executors, fresh: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It is waited for once, also if the others hang as well, and meanwhile the stream is not stuck."""
    for name in ("named", "c++", "g++", "clang++"):
        script = fresh / name
        script.write_text(f"#!/bin/sh\necho {name} >>{fresh}/asked\nexec sleep 60\n")
        script.chmod(0o700)
    executors.monkeypatch.setenv("CXX", str(fresh / "named"))
    executors.monkeypatch.setenv("PATH", f"{fresh}:{os.environ['PATH']}")
    executors.monkeypatch.setattr(_compiler, "_LIMIT", 0.3)
    executors.choose("always")
    given, was_preparing = await executors.device.put(np.arange(9.0)), list[bool]()
    stream = CpuStream("idle")
    first = _compiler._first_of

    def asked(names: Sequence[str]) -> _compiler.Compiler | None:
        was_preparing.append(stream.is_preparing)
        return first(names)

    executors.monkeypatch.setattr(_compiler, "_first_of", asked)
    for number in range(3):
        made = await jit.elementwise(f"x + {number}.25", inputs=("x",))(given)
        np.testing.assert_array_equal(await made.to_host(), np.arange(9.0) + number + 0.25)
    assert (fresh / "asked").read_text() == "named\n"
    assert (was_preparing, stream.is_preparing) == ([True], False)
    assert "cannot be used" in caplog.text


@pytest.mark.own_launcher
async def test_a_worker_killed_while_it_compiles_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its launcher kills the shell that would remove the folder, which takes a while for this many files."""
    compiler_that(f"seq 5000 | xargs touch; touch {fresh}/begun; sleep 62", fresh, monkeypatch)
    room = fresh / "room"
    room.mkdir()
    monkeypatch.setenv("TMPDIR", str(room))
    monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", "always")
    options = ta.DeviceOptions(isolation="process")
    async with ta.open_system("killed") as system, system.open_device("cpu", options=options) as device:
        given = await device.put(np.arange(9.0))
        pid = (await device.statistics()).pid
        assert pid is not None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_fails, jit.elementwise("x * 3.25 + 1", inputs=("x",))(given))
            await trio.to_thread.run_sync(wait_for, (fresh / "begun").exists)
            assert [*room.iterdir()]
            os.kill(pid, signal.SIGKILL)
        # The launcher ends what is left of a worker before it starts the next one.
        np.testing.assert_array_equal(await given.to_host(), np.arange(9.0))
        await trio.to_thread.run_sync(wait_for, lambda: not [*room.iterdir()])


async def _fails(call: Awaitable[object]) -> None:
    with pytest.raises(ta.ContextLostError):
        await call


def test_old_folders_are_removed_and_folders_in_use_stay(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in ("mine-old", "mine-new", "other-old"))
    for folder in (old, new, other):
        folder.mkdir()
        (folder / "log").write_text("text")
    (tmp_path / "mine-file").write_text("text")
    (tmp_path / "mine-link").symlink_to(other)
    for path in (old, other, tmp_path / "mine-file"):
        os.utime(path, (0, 0))
    remove_stale(tmp_path, "mine-[a-z]+")
    assert sorted(os.listdir(tmp_path)) == ["mine-link", "mine-new", "other-old"]
    assert os.listdir(other) == ["log"]
    remove_stale(tmp_path / "nowhere", "mine-[a-z]+")


PROGRAM = """
import sys
from trio_accel.backends.cpu.compiled import _compiler
print("begins", flush=True)
_compiler.compile_text("int x;")
"""


def test_a_process_killed_while_it_compiles_leaves_nothing(
    fresh: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler_that(f"echo $$ >{fresh}/pid; sleep 61 & sleep 61", fresh, monkeypatch)
    room = fresh / "room"
    room.mkdir()
    environment = {**os.environ, "TMPDIR": str(room), "PYTHONPATH": SEARCHED}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begins\n"
        wait_for(lambda: (fresh / "pid").exists() and (fresh / "pid").read_text().strip() != "")
        group = os.getpgid(int((fresh / "pid").read_text()))
        assert [*room.iterdir()]
        process.send_signal(signal.SIGKILL)
    wait_for(lambda: not members(group))
    wait_for(lambda: not [*room.iterdir()])


def members(group: int) -> list[str]:
    found: list[str] = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = stat.read_text()
        except OSError:
            continue
        fields = text.rpartition(")")[2].split()
        if int(fields[2]) == group and fields[0] != "Z":
            found.append(text)
    return found


def wait_for(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_invalid_mode_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", "sometimes")
    with pytest.raises(ta.AccelError, match="must be auto, never or always, got 'sometimes'"):
        _compiler.mode()


KILLED = """
import os, signal, sys
import numpy as np, trio
import trio_accel as ta
from benchmarks import cpu_expressions as programs

async def main():
    step, _, _ = programs.life()
    cells = (np.random.default_rng(0).random((programs.SIDE,) * 2) < 0.3).astype(np.uint8)
    options = ta.DeviceOptions(isolation="process")
    async with ta.open_system("life") as system, system.open_device("cpu:0", options=options) as device:
        kept = await device.put(cells)
        for number in range(40):
            kept = await step(kept, shape=cells.shape)
            if number in (3, 25) and "kill" in sys.argv:
                os.kill((await device.statistics()).pid, signal.SIGKILL)
                # The cells were lost with the worker: the next step is from what the program has.
                try:
                    host = await kept.to_host()
                except ta.StaleRefError:
                    kept = await device.put(before)
                    kept = await step(kept, shape=cells.shape)
            before = await kept.to_host()
    sys.stdout.buffer.write(before.tobytes())

trio.run(main)
"""


@pytest.mark.slow
@pytest.mark.own_launcher
def test_a_kill_in_the_middle_changes_no_bit(fresh: Path) -> None:
    """NumPy computes the first steps, compiled code the later ones; both begin again in each worker."""
    made: list[bytes] = []
    for mode, told in (("auto", "kill"), ("auto", "go"), ("never", "go")):
        environment = {**os.environ, "TRIO_ACCEL_CPU_COMPILED": mode, "PYTHONPATH": SEARCHED}
        command = [sys.executable, "-c", KILLED, told]
        made.append(
            subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, check=True).stdout
        )
    assert len(made[0]) == 512 * 512
    assert made[0] == made[1] == made[2]
