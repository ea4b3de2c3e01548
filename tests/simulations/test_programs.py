"""Common properties of all simulations: their command line, kills that change no bit, files, and a page."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

import httpx2
import numpy as np
import pytest
from chosen import BACKEND, ROOT, SEARCHED
from PIL import Image

pytestmark = pytest.mark.examples

FOLDER = ROOT / "examples" / "simulations"
SHARED = {"simulation", "drawing", "page"}
NAMES = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in SHARED)
# Program, and the options of a short run.
RUNS = [(name, f"--size {4 if name == 'bricks' else 16} --steps 8") for name in NAMES] + [
    ("cloth", "--size 8 --steps 8 --solver xpbd")
]

Program = Callable[..., tuple[int, str]]
linux = pytest.mark.skipif(sys.platform != "linux", reason="worker processes are on Linux only")


@pytest.fixture
def program(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Program:
    """Runs a simulation as its command line would, in this process."""

    def run(name: str, *arguments: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", "--backend", BACKEND, *arguments])
        code = import_module(name).main()
        return code, capsys.readouterr().out

    return run


@linux
@pytest.mark.stand_in
@pytest.mark.parametrize(("name", "options"), RUNS, ids=[f"{name}-{k}" for k, (name, _) in enumerate(RUNS)])
def test_three_kills_change_no_bit(program: Program, name: str, options: str) -> None:
    code, printed = program(name, *options.split(), "--faults")
    assert code == 0
    assert printed.splitlines()[1:] == ["killed 3 times: the same bits"]
    assert printed.startswith(f"8 steps on {BACKEND}:0: ")


@pytest.mark.parametrize("name", NAMES)
def test_a_simulation_is_short_and_describes_itself(
    name: str, capsys: pytest.CaptureFixture[str], program: Program
) -> None:
    source = (FOLDER / f"{name}.py").read_text(encoding="utf-8")
    assert len(source.splitlines()) <= 115
    assert f"Run it with: python {name}.py" in source
    with pytest.raises(SystemExit) as ended:
        program(name, "--help")
    assert ended.value.code == 0
    assert capsys.readouterr().out.startswith(f"usage: {name}.py ")


def test_a_seed_decides_all(program: Program, tmp_path: Path) -> None:
    pictures = list[np.ndarray]()
    for number, seed in enumerate((1, 1, 2)):
        file = tmp_path / f"{number}.png"
        code, _ = program("filters", *f"--size 16 --steps 2 --seed {seed} --out {file}".split())
        assert code == 0
        pictures.append(np.asarray(Image.open(file)))
    assert pictures[0].shape == (32, 28, 3)
    np.testing.assert_array_equal(pictures[0], pictures[1])
    assert (pictures[0] != pictures[2]).any()


@pytest.mark.parametrize("suffix", ["apng", "gif"])
def test_a_film_has_a_frame_for_each_step(program: Program, tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"film.{suffix}"
    code, _ = program("video", *f"--size 18 --steps 12 --out {file}".split())
    assert code == 0
    with Image.open(file) as film:
        assert (film.size, getattr(film, "n_frames", 1)) == ((32, 18), 12)


def test_a_film_in_mp4(program: Program, tmp_path: Path) -> None:
    pytest.importorskip("imageio_ffmpeg")
    file = tmp_path / "film.mp4"
    assert program("video", *f"--size 36 --steps 5 --out {file}".split())[0] == 0
    assert b"ftyp" in file.read_bytes()[:16]


@linux
def test_the_page_has_newer_and_newer_frames_while_workers_die(tmp_path: Path) -> None:
    command = (sys.executable, "-W", "error", FOLDER / "video.py", "--size=18", "--port=0", "--faults")
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": SEARCHED, "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            url = (process.stdout or sys.stdin).readline().split()[-1]
            with httpx2.Client(trust_env=False, timeout=20.0, base_url=url) as client:
                assert "frame.png" in client.get("/").text
                frames = set[bytes]()
                while len(frames) < 20:
                    shown = client.get("/frame.png")
                    assert shown.headers["content-type"] == "image/png"
                    frames.add(shown.content)
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in told
