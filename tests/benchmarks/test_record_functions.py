"""A recording of functions is the same each time, and a comparison finds what has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import record_functions
from trio_accel.backends.cpu.compiled import _compiler, _plans

pytestmark = [pytest.mark.no_device, pytest.mark.one_backend]


async def recorded(folder: Path, *, texts: bool = False) -> dict[str, dict[str, str]]:
    folder.mkdir()  # noqa: ASYNC240  # a folder of the test
    await record_functions.record(folder, ("fft",), quick=True, texts=texts)
    found: dict[str, dict[str, str]] = json.loads((folder / "results.json").read_text())
    return found


async def test_two_recordings_are_equal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = await recorded(tmp_path / "first")
    await recorded(tmp_path / "second")
    assert first["skipped"] == {}
    assert len(first["results"]) == 6 * len(first["arguments"])
    assert "fft.rfft|float32|transposed" in first["results"]
    assert not record_functions.compare(tmp_path / "first", tmp_path / "second")
    assert "0 are lost, 0 changed" in capsys.readouterr().out


async def test_a_change_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = await recorded(tmp_path / "first")
    (tmp_path / "second").mkdir()
    name = "fft.fft|float64|plain"
    first["results"][name] = first["results"][name].replace("complex128", "complex64")
    del first["results"]["fft.ifft|float64|plain"]
    (tmp_path / "second" / "results.json").write_text(json.dumps(first))
    assert record_functions.compare(tmp_path / "first", tmp_path / "second")
    out = capsys.readouterr().out
    assert "1 are lost, 1 changed" in out
    assert f"fft.fft: 1, such as {name}: complex128" in out


async def test_sources_are_stored(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if _compiler.compiler() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("TRIO_ACCEL_CPU_COMPILED", "always")
    monkeypatch.setattr(_plans, "compile_text", lambda text: None)
    first = await recorded(tmp_path / "first", texts=True)
    names = {name for files in first["texts"].values() for name in files}
    assert {name.rpartition(".")[2] for name in names} == {"cu", "cpp"}
    for name in names:
        assert "Arguments" in (tmp_path / "first" / "texts" / name).read_text()
    heads = [path.read_text() for path in (tmp_path / "first" / "heads").iterdir()]
    assert all("f_add" in head and "struct Arguments" not in head for head in heads)
    # Another text of one kernel is shown by its lines.
    (tmp_path / "second").mkdir()
    key, files = next(iter(first["texts"].items()))
    text = (tmp_path / "first" / "texts" / files[0]).read_text()
    (tmp_path / "second" / "texts").mkdir()
    (tmp_path / "second" / "texts" / "other.cu").write_text(f"{text}// one more line\n")
    first["texts"] = {**first["texts"], key: ["other.cu"]}  # type: ignore[dict-item]
    (tmp_path / "second" / "results.json").write_text(json.dumps(first))
    capsys.readouterr()
    assert not record_functions.compare(tmp_path / "first", tmp_path / "second")
    assert "+// one more line" in capsys.readouterr().out
