from __future__ import annotations

import importlib.util
import io
import json
import os
from collections.abc import Callable
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
RATE = 8000
PNG = b"\x89PNG\r\n\x1a\n"


def tone(path: Path, frequency: float, seconds: float = 1.0, level: float = 0.5, channels: int = 1) -> Path:
    samples = level * np.sin(2 * np.pi * frequency * np.arange(int(RATE * seconds)) / RATE)
    wavfile.write(path, RATE, np.stack([samples] * channels, axis=1).astype(np.float32))
    return path


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
    assert data["audio"] == "sense_and_sensibility_01.wav"
    assert (data["rate"], data["channels"], data["encoding"]) == (16000, 1, "16-bit PCM")
    assert (data["window"], data["hop"], data["frames"]) == (512, 128, 371)
    assert data["duration"] == pytest.approx(2.99)
    assert data["picture"] == "spectrogram.png"
    assert [path.name for path in tmp_path.iterdir()] == ["spectrogram.png"]
    assert size_of(tmp_path / "spectrogram.png") == (1400, 700)


def test_a_tone_is_found_where_it_is(cli: Cli, tmp_path: Path) -> None:
    step = run(
        cli, "--audio", tone(tmp_path / "tone.wav", 1000.0, level=0.5), "--output", tmp_path / "tone.PNG"
    )
    data = step["data"]
    # 1000 Hz is the middle of bin 32, half of full scale is 6.02 dB down.
    assert data["window"] == 256
    assert data["peak_frequency"] == 1000.0
    assert data["peak_level"] == pytest.approx(20 * np.log10(0.5), abs=0.01)
    assert size_of(tmp_path / "tone.PNG") == (1400, 700)


def test_the_levels_are_those_of_scipy(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Any] = []

    def draw(recording: object, cut: object, levels: Any) -> bytes:
        drawn.append(levels)
        return PNG

    monkeypatch.setattr("trio_accel.cli._spectrum._draw_spectrogram", draw)
    samples = np.random.default_rng(1).uniform(-1, 1, 5000).astype(np.float32)
    wavfile.write(tmp_path / "noise.wav", RATE, samples)
    data = run(cli, "--audio", tmp_path / "noise.wav")["data"]
    window, hop = data["window"], data["hop"]
    _, _, reference = stft(samples, RATE, "hann", window, window - hop, boundary=None, padded=True)
    [levels] = drawn
    columns = min(levels.shape[0], reference.shape[1])
    assert columns >= data["frames"] - 1
    # SciPy scales to amplitude; the other half of a sine is at the negative frequency. The device's numbers
    # are float32.
    power = 10 ** (levels[:columns] / 10)
    assert power == pytest.approx(4 * np.abs(reference.T[:columns]) ** 2, rel=1e-5, abs=1e-9)


def test_channels_are_mixed_down_and_that_is_said(cli: Cli, tmp_path: Path) -> None:
    step = run(cli, "--audio", tone(tmp_path / "stereo.wav", 500.0, channels=2))
    assert step["notes"] == ["2 channels mixed down to their mean"]
    assert step["data"]["peak_frequency"] == 500.0


@pytest.mark.parametrize("count", [1, 15, 255, 256, 257, 320, 321])
def test_recordings_shorter_than_a_window(cli: Cli, tmp_path: Path, count: int) -> None:
    data = run(cli, "--audio", tone(tmp_path / "short.wav", 1000.0, count / RATE + 1e-9))["data"]
    assert data["frames"] == (1 if count <= 256 else 2 if count <= 320 else 3)
    assert size_of(tmp_path / "spectrogram.png") == (1400, 700)


def test_silence(cli: Cli, tmp_path: Path) -> None:
    wavfile.write(tmp_path / "silence.wav", RATE, np.zeros(4000, np.int16))
    step = run(cli, "--audio", tmp_path / "silence.wav")
    assert step["notes"] == ["the recording is silent"]
    assert step["data"]["peak_level"] is None
    assert size_of(tmp_path / "spectrogram.png") == (1400, 700)


def test_a_constant_is_no_tone(cli: Cli, tmp_path: Path) -> None:
    samples = 0.9 + 0.01 * np.sin(2 * np.pi * 1000 * np.arange(RATE) / RATE)
    wavfile.write(tmp_path / "offset.wav", RATE, samples.astype(np.float32))
    assert run(cli, "--audio", tmp_path / "offset.wav")["data"]["peak_frequency"] == 1000.0


def test_a_long_recording_gets_columns_that_a_picture_can_show(cli: Cli, tmp_path: Path) -> None:
    seconds = 70.0
    step = run(cli, "--audio", tone(tmp_path / "long.wav", 1000.0, seconds))
    assert step["data"]["frames"] == 1 + -(-(int(RATE * seconds) - 256) // 64) > 8000
    assert step["data"]["peak_level"] == pytest.approx(20 * np.log10(0.5), abs=0.01)
    assert 0 <= step["data"]["peak_time"] <= seconds


def test_strange_names_do_not_disturb_the_title(cli: Cli, tmp_path: Path) -> None:
    name = "größe $x_1$ 漢字 " + "n" * 80 + ".wav"
    assert run(cli, "--audio", tone(tmp_path / name, 700.0))["data"]["audio"].endswith(name)


def test_an_existing_picture_is_replaced(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "spectrogram.png").write_bytes(b"old")
    run(cli, "--audio", tone(tmp_path / "tone.wav", 700.0))
    assert size_of(tmp_path / "spectrogram.png") == (1400, 700)


def test_a_wrong_spectrum_is_found(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    to_host = ta.AccelRef.to_host

    async def spoiled(self: ta.AccelRef, *, out: Any = None) -> Any:
        host = await to_host(self, out=out)
        host[0, 5] += 1.0
        return host

    monkeypatch.setattr(ta.AccelRef, "to_host", spoiled)
    done = cli("demo", "spectrum", "--json", "--audio", tone(tmp_path / "tone.wav", 700.0))
    assert done.code == 1
    assert [check["ok"] for check in json.loads(done.out)["steps"][0]["checks"]] == [False, False]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "cannot read {path}: no such file or directory"),
        (b"", "{path} is empty"),
        (b"hello", "{path} is not a WAV file: it begins with b'hello'"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "{path} is not a valid WAV file: its parts do not fit together"),
    ],
)
def test_recordings_that_cannot_be_read(
    refused: Refused, tmp_path: Path, content: bytes | None, reason: str
) -> None:
    path = tmp_path / "x.wav"
    if content is not None:
        path.write_bytes(content)
    assert refused("demo", "spectrum", "--audio", path) == reason.format(path=path)
    assert not (tmp_path / "spectrogram.png").exists()


def test_an_endless_file_is_refused_by_its_beginning(refused: Refused) -> None:
    for command in ("spectrum --audio", "solve --matrix"):
        assert "/dev/zero is not a " in refused("demo", *command.split(), "/dev/zero")


def test_a_pipe_is_read_to_its_end(cli: Cli, tmp_path: Path) -> None:
    content = tone(tmp_path / "tone.wav", 1000.0, seconds=0.1).read_bytes()
    reader, writer = os.pipe()
    os.write(writer, content)
    os.close(writer)
    assert run(cli, "--audio", f"/dev/fd/{reader}")["data"]["duration"] == pytest.approx(0.1)
    os.close(reader)


@pytest.mark.parametrize(("rate", "window"), [(1, 16), (192_000, 8192), (1_000_000, 8192)])
def test_no_rate_makes_an_absurd_window(cli: Cli, tmp_path: Path, rate: int, window: int) -> None:
    wavfile.write(tmp_path / "x.wav", rate, np.arange(100, dtype=np.int8).astype(np.uint8))
    assert run(cli, "--audio", tmp_path / "x.wav")["data"]["window"] == window


def test_a_large_file_is_refused_before_the_rest_is_read(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wavfile.write(tmp_path / "x.wav", 8000, np.zeros((2 << 20), np.uint8))
    monkeypatch.setattr("trio_accel.cli._run.MOST_BYTES", 1 << 20)
    line = refused("demo", "spectrum", "--audio", tmp_path / "x.wav")
    assert line == f"{tmp_path / 'x.wav'} is too large: files of at most 1 MiB are read"


def test_a_directory_is_no_recording(refused: Refused, tmp_path: Path) -> None:
    assert refused("demo", "spectrum", "--audio", tmp_path) == f"cannot read {tmp_path}: it is a directory"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_recording_without_permission(refused: Refused, tmp_path: Path) -> None:
    path = tone(tmp_path / "x.wav", 1000.0)
    path.chmod(0)
    assert refused("demo", "spectrum", "--audio", path) == f"cannot read {path}: permission denied"


def test_refusals_in_json_are_one_document_too(cli: Cli) -> None:
    done = cli("demo", "spectrum", "--audio", "/no/such/file", "--json")
    assert done.code == 2
    assert done.err == "trio-accel: cannot read /no/such/file: no such file or directory\n"
    document = json.loads(done.out)
    assert (document["ok"], document["exit_code"], document["steps"]) == (False, 2, [])
    assert document["error"] == "cannot read /no/such/file: no such file or directory"


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
