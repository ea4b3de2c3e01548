"""The disk cache of compiled code: on plain folders, with a compiler that makes bytes of the source."""

from __future__ import annotations

import hashlib
import logging
import os
import resource
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from trio_accel import AccelError
from trio_accel.backends.base.kit.code_cache import CodeCache, CompiledCode, code_key, default_code_cache

CODE = CompiledCode(b"\x7fELF" + bytes(range(256)), {"add<float>": "_Z3addIfEvv"})
KEY = code_key(source="extern ...", options=("-arch=sm_90",), driver=13000)


def never() -> CompiledCode:
    raise AssertionError("it was compiled again")


def put(folder: Path) -> Path:
    """Keep one entry; returns its file."""
    CodeCache(folder).store(KEY, CODE)
    (entry,) = folder.iterdir()
    return entry


def test_compiled_code_is_found_by_the_next_process(tmp_path: Path) -> None:
    made = CodeCache(tmp_path / "made" / "here").compiled(KEY, lambda: CODE)
    assert made == CODE == CodeCache(tmp_path / "made" / "here").compiled(KEY, never)
    assert stat.S_IMODE((tmp_path / "made" / "here").stat().st_mode) == 0o700
    (entry,) = (tmp_path / "made" / "here").iterdir()
    assert stat.S_IMODE(entry.stat().st_mode) == 0o600


def test_failed_compilations_are_not_kept(tmp_path: Path) -> None:
    def compiler() -> CompiledCode:
        raise ValueError("line 3: expected a ;")

    cache = CodeCache(tmp_path / "kernels")
    for _ in range(2):
        with pytest.raises(ValueError, match="line 3"):
            cache.compiled(KEY, compiler)
    assert not (tmp_path / "kernels").exists()


@pytest.mark.parametrize(
    "other",
    [
        {"source": "extern ... "},
        {"options": ("-arch=sm_90", "")},
        {"options": ("-arch=sm_", "90")},
        {"options": "-arch=sm_90"},
        {"options": (b"-arch=sm_90",)},
        {"driver": 13010},
        {"driver": "13000"},
        {"more": ""},
    ],
)
def test_each_part_counts_for_the_key(other: dict[str, str | int | tuple[str | bytes, ...]]) -> None:
    parts = {"source": "extern ...", "options": ("-arch=sm_90",), "driver": 13000}
    assert code_key(**parts) == KEY
    assert code_key(**{**parts, **other}) != KEY


def test_a_truncated_entry_is_a_miss(tmp_path: Path) -> None:
    entry = put(tmp_path / "kernels")
    cache, whole = CodeCache(tmp_path / "kernels"), entry.read_bytes()
    for length in range(len(whole)):
        entry.write_bytes(whole[:length])
        assert cache.find(KEY) is None, length
    entry.write_bytes(whole)
    assert cache.find(KEY) == CODE


def test_an_entry_with_a_wrong_byte_is_a_miss_and_is_replaced(tmp_path: Path) -> None:
    entry = put(tmp_path / "kernels")
    cache, whole = CodeCache(tmp_path / "kernels"), entry.read_bytes()
    for place in range(len(whole)):
        entry.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        assert cache.find(KEY) is None, place
    entry.write_bytes(whole + b"\0")
    assert cache.find(KEY) is None
    assert cache.compiled(KEY, lambda: CODE) == CODE
    assert entry.read_bytes() == whole


def test_an_entry_of_another_version_or_key_is_a_miss(tmp_path: Path) -> None:
    entry = put(tmp_path / "kernels")
    whole, other = entry.read_bytes(), code_key(source="other")
    assert whole.startswith(b"trioaccel-code-1")
    (entry.parent / other.hex()).write_bytes(whole)
    assert CodeCache(entry.parent).find(other) is None
    entry.write_bytes(whole.replace(b"code-1", b"code-2", 1))
    assert CodeCache(entry.parent).find(KEY) is None


def test_a_folder_as_an_entry_is_a_miss(tmp_path: Path) -> None:
    entry = put(tmp_path / "kernels")
    elsewhere = tmp_path / "elsewhere"
    entry.rename(elsewhere)
    cache = CodeCache(entry.parent)
    for make in (entry.mkdir, lambda: entry.symlink_to(elsewhere), lambda: os.mkfifo(entry)):
        make()
        assert cache.find(KEY) is None
        entry.rmdir() if entry.is_dir() else entry.unlink()
    elsewhere.rename(entry)
    assert cache.find(KEY) == CODE


def test_an_entry_that_others_may_write_to_is_a_miss(tmp_path: Path) -> None:
    entry = put(tmp_path / "kernels")
    for mode in (0o620, 0o602):
        entry.chmod(mode)
        assert CodeCache(entry.parent).find(KEY) is None
    entry.chmod(0o644)
    assert CodeCache(entry.parent).find(KEY) == CODE


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_an_entry_of_another_user_is_a_miss(tmp_path: Path) -> None:
    entry = put(tmp_path / "kernels")
    os.chown(entry, 12345, -1)
    assert CodeCache(entry.parent).find(KEY) is None


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_to_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int
) -> None:
    entry = put(tmp_path / "kernels")
    entry.parent.chmod(mode)
    cache = CodeCache(entry.parent)
    assert [cache.compiled(KEY, lambda: CompiledCode(b"anew")).code for _ in range(3)] == [b"anew"] * 3
    (warning,) = caplog.records
    assert "others may write to it" in warning.getMessage()
    assert str(entry.parent) in warning.getMessage()
    assert list(entry.parent.iterdir()) == [entry]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files to others")
def test_a_folder_of_another_user_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    entry = put(tmp_path / "kernels")
    os.chown(entry.parent, 12345, -1)
    cache = CodeCache(entry.parent)
    assert cache.compiled(KEY, lambda: CompiledCode(b"anew")).code == b"anew"
    assert [record.levelno for record in caplog.records] == [logging.WARNING]


@pytest.mark.parametrize("what", ["file", "missing parent"])
def test_a_folder_that_cannot_be_made_is_reported_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, what: str
) -> None:
    (tmp_path / "file").write_text("no folder")
    cache = CodeCache(tmp_path / "file" / "kernels" if what == "missing parent" else tmp_path / "file")
    assert [cache.compiled(KEY, lambda: CODE) for _ in range(3)] == [CODE] * 3
    assert len(caplog.records) == 1


@contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """Files of this process end after a number of bytes, as on a full disk."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = CodeCache(tmp_path / "kernels")
    with full_disk(100):
        assert [cache.compiled(KEY, lambda: CODE) for _ in range(3)] == [CODE] * 3
    assert list((tmp_path / "kernels").iterdir()) == []
    assert len(caplog.records) == 1
    # There is room again.
    cache.compiled(KEY, lambda: CODE)
    assert cache.compiled(KEY, never) == CODE


def run(script: str, *arguments: object) -> list[str]:
    """Run a program that ends well; returns its lines."""
    command = [sys.executable, "-c", script, *map(str, arguments)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.split()


READ_ONLY = """
import os, sys
from pathlib import Path
from trio_accel.backends.base.kit.code_cache import CodeCache, CompiledCode, code_key
os.chmod(sys.argv[1], 0o500)
os.setuid(os.stat(sys.argv[1]).st_uid)
cache = CodeCache(Path(sys.argv[1]))
print(cache.compiled(code_key(source="there"), lambda: CompiledCode(b"anew")).code.decode())
print(cache.compiled(code_key(source="not there"), lambda: CompiledCode(b"anew")).code.decode())
"""


def test_a_read_only_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    CodeCache(folder).store(code_key(source="there"), CompiledCode(b"old"))
    if os.geteuid() == 0:
        # Root writes everywhere, so a program of another user reads it; its way there has to be open.
        for path in (folder, *folder.iterdir()):
            os.chown(path, 12345, -1)
        for parent in folder.parents:
            if parent.stat().st_uid == 0 and parent.is_relative_to("/tmp/pytest-of-root"):
                parent.chmod(0o711)
    assert run(READ_ONLY, folder) == ["old", "anew"]
    assert len(list(folder.iterdir())) == 1


FARM = """
import hashlib, os, sys, traceback
from pathlib import Path
from trio_accel.backends.base.kit.code_cache import CodeCache, CompiledCode, code_key

folder, count, cap = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def source_of(number):
    return f'extern "C" __global__ void kernel_{number}() {{}}'

def compiled(number):
    seed = hashlib.sha256(source_of(number).encode()).digest()
    return CompiledCode(seed * (1 + number % 97), {"kernel": f"kernel_{number}"})

def size():
    total = 0
    with os.scandir(folder) as entries:
        for entry in entries:
            try:
                total += entry.stat().st_size
            except FileNotFoundError:
                pass
    return total

def work(place):
    cache = CodeCache(folder, cap=cap)
    made = 0
    def compiler():
        nonlocal made
        made += 1
        return compiled(number)
    for turn in range(count):
        number = (turn * 7 + place * 131) % count
        assert cache.compiled(code_key(source=source_of(number)), compiler) == compiled(number), number
        if turn % 50 == 0:
            assert size() <= cap
    return made

children = []
for place in range(8):
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        made = -1
        try:
            made = work(place)
        except BaseException:
            traceback.print_exc()
        finally:
            os.write(writing, str(made).encode())
            os._exit(made < 0)
    os.close(writing)
    children.append((child, reading))
for child, reading in children:
    assert os.waitpid(child, 0)[1] == 0
    print(os.read(reading, 20).decode())
"""


@pytest.mark.slow
def test_many_processes_compile_many_kernels_into_one_folder(tmp_path: Path) -> None:
    made = [int(line) for line in run(FARM, tmp_path / "kernels", 1000, 1 << 30)]
    assert len(made) == 8
    assert 1000 <= sum(made) < 8000
    entries = list((tmp_path / "kernels").iterdir())
    assert len(entries) == 1000
    # Entries are made by hashing, so each is right if it is whole; nothing temporary is left.
    for number in range(1000):
        source = f'extern "C" __global__ void kernel_{number}() {{}}'
        seed = hashlib.sha256(source.encode()).digest()
        found = CodeCache(tmp_path / "kernels").find(code_key(source=source))
        assert found == CompiledCode(seed * (1 + number % 97), {"kernel": f"kernel_{number}"})


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


@pytest.mark.slow
def test_many_processes_stay_under_the_cap(tmp_path: Path) -> None:
    # All of it would be 0.6 MB.
    run(FARM, tmp_path / "kernels", 400, 250_000)
    assert 125_000 < size_of(tmp_path / "kernels") <= 250_000


def test_the_least_recently_used_entry_makes_way(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    cache = CodeCache(folder, cap=10_000)
    keys = [code_key(source=str(number)) for number in range(6)]
    for age, key in enumerate(keys):
        cache.store(key, CompiledCode(bytes(1000)))
        # An hour between them, so that clocks and file systems do not matter.
        os.utime(folder / key.hex(), (time.time() - 36_000 + 3600 * age,) * 2)
    assert cache.find(keys[0]) is not None
    for number in range(4):
        cache.store(code_key(source=f"new {number}"), CompiledCode(bytes(1000)))
    assert size_of(folder) <= 10_000
    left = [number for number, key in enumerate(keys) if cache.find(key) is not None]
    assert left[0] == 0
    assert 1 not in left
    assert left[-1] == 5


def test_large_code_is_not_kept(tmp_path: Path) -> None:
    cache = CodeCache(tmp_path / "kernels", cap=8_000)
    cache.store(KEY, CompiledCode(bytes(1000)))
    assert cache.find(KEY) is None
    with pytest.raises(ValueError, match="cap"):
        CodeCache(tmp_path, cap=0)


KILLED = """
import os, signal, sys
from pathlib import Path
from trio_accel.backends.base.kit import code_cache

cache = code_cache.CodeCache(Path(sys.argv[1]), cap=100_000)
for number in range(50):
    child = os.fork()
    if not child:
        def die(*arguments, **keywords):
            os.kill(os.getpid(), signal.SIGKILL)
        os.replace = die
        cache.store(code_cache.code_key(source=str(number)), code_cache.CompiledCode(bytes(5000)))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
"""


def test_killed_writers_leave_little_behind(tmp_path: Path) -> None:
    folder = tmp_path / "kernels"
    run(KILLED, folder)
    assert size_of(folder) <= 100_000
    left = [path for path in folder.iterdir() if path.name.startswith(".new-")]
    assert left
    for path in left:
        os.utime(path, (time.time() - 3600,) * 2)
    CodeCache(folder, cap=100_000).store(KEY, CODE)
    assert [path.name for path in folder.iterdir()] == [KEY.hex()]


def test_without_a_folder_everything_is_compiled(tmp_path: Path) -> None:
    cache = CodeCache(None)
    made = [CompiledCode(b"1"), CompiledCode(b"2")]
    assert [cache.compiled(KEY, made.pop).code for _ in range(2)] == [b"2", b"1"]
    kept = CodeCache(tmp_path / "kernels")
    assert kept.compiled(None, lambda: CODE) == CODE
    assert not (tmp_path / "kernels").exists()


def test_the_environment_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PATH", "MAXSIZE", "DISABLE"):
        monkeypatch.delenv(f"TRIO_ACCEL_CACHE_{name}", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_code_cache().folder == tmp_path / "trio-accel" / "kernels"
    assert default_code_cache().cap == 1 << 30
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert default_code_cache().folder == tmp_path / "home" / ".cache" / "trio-accel" / "kernels"
    monkeypatch.setenv("TRIO_ACCEL_CACHE_PATH", "~/kernels")
    monkeypatch.setenv("TRIO_ACCEL_CACHE_MAXSIZE", "5000000")
    assert (default_code_cache().folder, default_code_cache().cap) == (tmp_path / "home/kernels", 5_000_000)
    assert default_code_cache() is default_code_cache()
    monkeypatch.setenv("TRIO_ACCEL_CACHE_DISABLE", "1")
    assert default_code_cache().folder is None
    monkeypatch.setenv("TRIO_ACCEL_CACHE_MAXSIZE", "5 GB")
    with pytest.raises(AccelError, match="TRIO_ACCEL_CACHE_MAXSIZE"):
        default_code_cache()
