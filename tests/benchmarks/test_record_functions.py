"""A recording of functions is the same each time, and a comparison finds what has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record_functions
from trio_accel.backends.cpu.compiled import _compiler, _plans

pytestmark = [pytest.mark.no_device, pytest.mark.one_backend]


def results_of(folder: Path) -> dict[str, dict[str, str]]:
    found: dict[str, dict[str, str]] = json.loads((folder / "results.json").read_text())
    return found


@pytest.fixture
def first(tmp_path: Path) -> Path:
    folder = tmp_path / "first"
    folder.mkdir()
    return folder


@pytest.fixture
def second(tmp_path: Path) -> Path:
    folder = tmp_path / "second"
    folder.mkdir()
    return folder


async def recorded(folder: Path, *, texts: bool = False) -> dict[str, dict[str, str]]:
    await record_functions.record(folder, ("fft",), quick=True, texts=texts)
    return results_of(folder)


async def test_two_recordings_are_equal(
    first: Path, second: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = await recorded(first)
    await recorded(second)
    assert found["skipped"] == {}
    assert len(found["results"]) == 6 * len(found["arguments"])
    assert "fft.rfft|float32|transposed" in found["results"]
    assert not record_functions.compare(first, second)
    assert "0 are lost, 0 changed" in capsys.readouterr().out


async def test_a_change_is_found(first: Path, second: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = await recorded(first)
    name = "fft.fft|float64|plain"
    found["results"][name] = found["results"][name].replace("complex128", "complex64")
    del found["results"]["fft.ifft|float64|plain"]
    (second / "results.json").write_text(json.dumps(found))
    assert record_functions.compare(first, second)
    out = capsys.readouterr().out
    assert "1 are lost, 1 changed" in out
    assert f"fft.fft: 1, such as {name}: complex128" in out


async def test_sources_are_stored(
    first: Path, second: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if _compiler.compiler() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", "always")
    monkeypatch.setattr(_plans, "compile_text", lambda text: None)
    found = await recorded(first, texts=True)
    names = {name for files in found["texts"].values() for name in files}
    assert {name.rpartition(".")[2] for name in names} == {"cu", "cpp"}
    for name in names:
        assert "Arguments" in (first / "texts" / name).read_text()
    heads = [path.read_text() for path in (first / "heads").iterdir()]
    assert all("f_add" in head and "struct Arguments" not in head for head in heads)
    # Another text of one kernel is shown by its lines.
    key, files = next(iter(found["texts"].items()))
    text = (first / "texts" / files[0]).read_text()
    (second / "texts").mkdir()
    (second / "texts" / "other.cu").write_text(f"{text}// one more line\n")
    found["texts"] = {**found["texts"], key: ["other.cu"]}  # type: ignore[dict-item]
    (second / "results.json").write_text(json.dumps(found))
    capsys.readouterr()
    assert not record_functions.compare(first, second)
    assert "+// one more line" in capsys.readouterr().out
