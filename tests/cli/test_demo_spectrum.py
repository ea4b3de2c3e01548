from __future__ import annotations

import importlib.util
import io
import json
import os
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from scipy.io import wavfile
from scipy.signal import stft

import trio_accel as ta

if TYPE_CHECKING:
    from command import Cli

Refused = Callable[..., str]
PNG = b"\x89PNG\r\n\x1a\n"


def run(cli: Cli, *arguments: object) -> dict[str, Any]:
    done = cli("demo", "spectrum", "--json", *arguments)
    assert (done.code, done.err) == (0, "")
    step: dict[str, Any] = json.loads(done.out)["steps"][0]
    assert step["ok"] is True
    assert [check["name"] for check in step["checks"]] == [
        "rfft of every frame, relative error",
        "irfft gives the frames back",
    ]
    return step


def size_of(png: Path) -> tuple[int, int]:
    from PIL import Image

    content = png.read_bytes()
    assert content.startswith(PNG)
    with Image.open(io.BytesIO(content)) as image:
        image.load()
        return image.size


def test_the_carried_recording(cli: Cli, tmp_path: Path) -> None:
    data = run(cli)["data"]
    assert (data["audio"], data["rate"]) == ("sense_and_sensibility_01.wav", 16000)
    assert (data["window"], data["hop"], data["frames"]) == (512, 128, 371)
    assert data["duration"] == pytest.approx(2.99)
    assert data["picture"] == "spectrogram.png"
    assert [path.name for path in tmp_path.iterdir()] == ["spectrogram.png"]
    assert size_of(tmp_path / "spectrogram.png") == (1400, 700)


def test_the_levels_are_those_of_scipy(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def draw(rate: int, levels: Any) -> bytes:
        drawn.append(levels)
        return PNG

    monkeypatch.setattr("trio_accel.cli._spectrum._draw_spectrogram", draw)
    data = run(cli)["data"]
    with (files("trio_accel.cli") / "data" / data["audio"]).open("rb") as file:
        rate, samples = wavfile.read(file)
    _, _, reference = stft(samples / 2**15, rate, "hann", 512, 384, boundary=None, padded=True)
    # SciPy scales to amplitude; the other half of a sine is at the negative frequency. The device's numbers
    # are float32.
    power, [levels] = 4 * np.abs(reference.T) ** 2, drawn
    assert 10 ** (levels / 10) == pytest.approx(power, rel=1e-5, abs=1e-9)
    frame, row = np.unravel_index(np.argmax(power), power.shape)
    assert data["peak_level"] == pytest.approx(10 * np.log10(power.max()), abs=0.01)
    assert data["peak_frequency"] == row * rate / 512
    assert data["peak_time"] == pytest.approx((frame * 128 + 256) / rate)


def test_an_existing_picture_is_replaced(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "x.PNG").write_bytes(b"old")
    run(cli, "--output", "x.PNG")
    assert size_of(tmp_path / "x.PNG") == (1400, 700)


def test_a_wrong_spectrum_is_found(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = ta.AccelRef.to_host

    async def spoiled(self: ta.AccelRef, *, out: Any = None) -> Any:
        host = await to_host(self, out=out)
        host[0, 5] += 1.0
        return host

    monkeypatch.setattr(ta.AccelRef, "to_host", spoiled)
    done = cli("demo", "spectrum", "--json")
    assert done.code == 1
    assert [check["ok"] for check in json.loads(done.out)["steps"][0]["checks"]] == [False, False]


def test_refusals_in_json_are_one_document_too(cli: Cli) -> None:
    done = cli("demo", "spectrum", "--output", "no/x.png", "--json")
    assert done.code == 2
    assert done.err == "trio-accel: cannot write no/x.png: there is no directory no\n"
    document = json.loads(done.out)
    assert (document["ok"], document["exit_code"], document["steps"]) == (False, 2, [])
    assert document["error"] == "cannot write no/x.png: there is no directory no"


def test_outputs_that_cannot_be_written(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "file").write_bytes(b"")

    def reason(output: str) -> str:
        return refused("demo", "spectrum", "--output", output)

    assert reason("x.jpg") == "cannot write x.jpg: the picture is a PNG, so the name must end in .png"
    assert reason("folder.png") == "cannot write folder.png: it is a directory"
    assert reason("no/x.png") == "cannot write no/x.png: there is no directory no"
    assert reason("file/x.png") == "cannot write file/x.png: file is not a directory"
    if os.geteuid() != 0:
        tmp_path.chmod(0o500)
        assert reason("x.png") == "cannot write x.png: permission denied"
        tmp_path.chmod(0o700)


def test_an_output_that_fails_in_the_end(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    done = cli("demo", "spectrum")
    assert done.code == 2
    assert done.err == "trio-accel: cannot write spectrogram.png: no space left on device\n"


def without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: None if name == "matplotlib" else find_spec(name, *rest),
    )


def test_without_matplotlib_the_step_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    without_matplotlib(monkeypatch)
    line = refused("demo", "spectrum")
    assert line == "a spectrogram needs Matplotlib: pip install '.[plot]' in a checkout"
