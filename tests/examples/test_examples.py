"""Every program in examples/ runs on the CPU backend and prints what it promises."""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import httpx2
import numpy as np
import pytest
from http_2 import HTTP_2, check_http_2
from scipy.io import wavfile

pytestmark = pytest.mark.examples

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"

# Programs that need worker processes, which only Linux has.
ISOLATED = (
    "surviving_worker.py",
    "own_library.py",
    "own_program.py",
    "onnx_model.py",
    "nearest.py",
    "checkpoint.py",
    "blend.py",
    "decay.py",
    "jit_saxpy.py",
    "cutlass_gemm.py",
    "embeddings.py",
    "train_digits.py",
    "heat.py",
    "digits_cnn.py",
    "hash_join.py",
)
# Modules used by a program in the same folder.
USED = {
    "bag_of_words.py": "embeddings.py",
    "own_operation.py": "decay.py",
    "nearest_numpy.py": "nearest.py",
    "nearest_torch.py": "nearest.py",
    "nearest_array_api.py": "nearest.py",
    "digits_models.py": "train_digits.py",
    "digits_torch.py": "train_digits.py",
    "gpt_model.py": "train_gpt.py",
    "training.py": "train_gpt.py",
}
# Lines: one with kernels for two backends may have more.
LONGEST = {
    # It draws a picture, and fits twice.
    "fit_simulation.py": 105,
    "own_kernel.py": 120,
    # It also has the compiler's command, a fault and a comparison.
    "cutlass_gemm.py": 150,
    # It checks facts that addresses do not show.
    "tensorrt_engine.py": 85,
    # It is also a module with a kernel.
    "all_reduce.py": 95,
    # It also has the connections.
    "server_sent_events.py": 100,
    # They explain a pattern, which lacks a page of its own.
    "mixture_of_experts.py": 130,
    "speculative_decoding.py": 135,
    # It also has its reference.
    "hash_join.py": 95,
    # Shared parts of the training examples: faults, a curve, a command line.
    "training.py": 110,
}

# Program, arguments, and the whole output as a pattern.
RUNS = [
    (
        "cutlass_gemm.py",
        "--size 64 --backend cpu",
        """
max[(]0, x @ weight [+] bias[)] of float16 on cpu:0, milliseconds with the launch
  size    CUTLASS    library   ratio difference poisoned
    64 +[0-9.]+ +[0-9.]+ +[0-9.]+ +[0-9.e+-]+      yes
differences at most 2e-03: right
""",
    ),
    (
        "larger_than_memory.py",
        "--memory 24 --batch 4 --backend cpu",
        """
18 batches of 4 MiB on cpu:0: no room for one array
streamed and added +[0-9.]+ GiB/s
bare copies +[0-9.]+ GiB/s
sum: right
""",
    ),
    (
        "matmul.py",
        "--size 96 --clients 3 --backend cpu",
        """
3 products of 96 × 96 on cpu:0
[0-9]+[.][0-9] GFLOP/s with transfers
largest relative error [0-9.]+e-0[78]: right
""",
    ),
    (
        "spectrum.py",
        "--backend cpu",
        """
   261[.]7 Hz +-?[0-9][.][0-9] dB
   328[.]1 Hz +-?[0-9][.][0-9] dB
   390[.]6 Hz +-?[0-9][.][0-9] dB
relative error [0-9.]+e-0[78]: right
""",
    ),
    (
        "conjugate_gradient.py",
        "--points 24 --backend cpu",
        """
576 unknowns, [0-9]{2} iterations on cpu:0
largest value 0[.]073[0-9]{2} [(]0[.]07367 on ever finer grids[)]
relative residual [0-9.]+e-1[12]: right
""",
    ),
    (
        "heat.py",
        "--points 24",
        """
step 0: [0-9]{2} iterations, generation 1
step 1: [0-9]{2} iterations, generation 1
step 2: [0-9]{2} iterations, generation 2
step 3: [0-9]{2} iterations, generation 2
largest error [0-9.]+e-[01][0-9]: right
""",
    ),
    (
        "digits.py",
        "--images 200 --backend cpu",
        # The share is that of scikit-learn's KNeighborsClassifier.
        """
200 images, 1597 known ones on cpu:0
95[.]0% are told right
digits as by NumPy: right
""",
    ),
    (
        "digits_cnn.py",
        "--rounds 2 --backend cpu",
        """
0 workers lost, 9[0-9][.][0-9]% are told right
1 workers lost, 9[0-9][.][0-9]% are told right
largest difference of a weight [0-9]e[-+][0-9]+: right
""",
    ),
    (
        "logistic_regression.py",
        "--samples 2000 --backend cpu",
        """
2000 points, [67] steps on cpu:0
right on 8[0-9][.][0-9]% of them
largest difference of a weight [0-9]e-[01][0-9]: right
""",
    ),
    (
        "train_digits.py",
        "--model transformer --devices 2 --steps 40 --faults 3 --quiet",
        """
2 ranks: 40 steps from 0 on in [0-9.]+ s, [0-9]+ workers lost, loss 0[.]928361
1 ranks: 40 steps from 0 on in [0-9.]+ s, 0 workers lost, loss 0[.]928361
largest difference to one undisturbed device: [0-9]e-1[0-9], right
""",
    ),
    (
        "recordings.py",
        "--samples 4096 --backend cpu",
        """
64 recordings of 4096 samples: on the device [0-9.]+ ms,
spectra copied out [0-9.]+ ms; 2560 bytes come back
tones: right
""",
    ),
    (
        "pipeline.py",
        "--recordings 12 --samples 4096 --backend cpu",
        """
read: 11 done, 1 failed
spectrum: 11 done, 0 failed
strongest: 11 done, 0 failed
11 of 12 right, in the order of the files
""",
    ),
    (
        "recover.py",
        "--requests 12 --faults 2 --backend cpu",
        """
recover [(]System[)] running
(?:.*
)*.*blas [(]BlasActor[)] running, .*2 restarts.*
(?:.*
)*  10 completed
   2 failed: a fault
every request has its outcome
""",
    ),
    (
        "surviving_worker.py",
        "--kills 2 --clients 3 --mebibytes 4 --backend cpu",
        """
generation 3, 4 MiB intact
[0-9]+ lost, [0-9]+ right
""",
    ),
    (
        "own_program.py",
        "--faults 2",
        """
40 steps, 2 workers lost, loss 0[.]0[0-9]{2}, [0-3] wrong
weights as without a device: right
""",
    ),
    (
        "onnx_model.py",
        "--backend cpu",
        """
generation 2, largest error [0-9]e-0[78]: right
""",
    ),
    (
        "nearest.py",
        "--library numpy",
        """
1000 points, 0[.]160 from their centres on average
centres and distances: right
""",
    ),
    (
        "checkpoint.py",
        "--faults 2",
        """
lost after 15 steps, back to 10
lost after 25 steps, back to 20
sums as without a device: right
""",
    ),
    (
        "own_library.py",
        "--rows 300 --columns 5 --isolation process --backend cpu",
        """
own_library:StatisticsActor [(]StatisticsActor[)] running, 3 handled
largest relative error [0-9.e+-]+: right
""",
    ),
    (
        "blend.py",
        "--isolation process --backend cpu",
        """
86 of 1000 clipped, right by [0-9e+-]+
187 of 1000 clipped, right by [0-9e+-]+
refused: 1000 elements are NaN [(]device cpu:0, operation own_kernel.Blend, generation 1[)]
""",
    ),
    (
        "decay.py",
        "--isolation process",
        """
  1 min: 1[.]00e[+]00 4[.]17e-05 3[.]62e-07 4[.]01e-08
 10 min: [0-9.e+ -]+
 60 min: 9[.]97e-01 [0-9.e+ -]+
largest error [0-9e+-]+: right
refused: own_operation[.]expm: the matrix holds a NaN or an infinity [(]device cpu:0, operation .*
""",
    ),
    (
        "hash_join.py",
        "--orders 20000 --backend cpu --faults",
        """
20000 orders joined in [0-9.]+ s on cpu:0, 3 workers lost
[0-9]+ cents in 8 regions, [0-9]+ without: right
""",
    ),
    (
        "jit_saxpy.py",
        "--isolation process --backend cpu",
        """
refused: jit.saxpy: x must have dtype float32, got float64; use cast[(][)]
largest error [0-9e+-]+: right
""",
    ),
    (
        "embeddings.py",
        "--sentences 50",
        """
<LoadedArrays: 2 arrays, 195072 bytes> [{]'words': '1000'[}]
50 embeddings, generation 2, the same bit for bit: True
largest error [0-9.e-]+: right
""",
    ),
    (
        "mixture_of_experts.py",
        "--backend cpu",
        """
like the dense computation: right
chosen [(]34, 31, 37, 26[)] served [(]32, 31, 32, 26[)]
dropped 7
this expert is away - lost tokens: 0
auxiliary loss 1[.]027
""",
    ),
    (
        "speculative_decoding.py",
        "--backend cpu",
        """
 arts and tor takes arratnchbxdonyialgyn a main, and time[.] w
60 tokens, 37 calls of the verifier
16% of the proposals were accepted
 arts and tor takes arratnchbxdonyialgyn a main, and time[.] [(]stop[)]
""",
    ),
    (
        "all_reduce.py",
        "--devices 3",
        """
3 ranks, right by [0-9e+-]+, the same bits
refused: all_reduce.Sum: terms must have the same shape and dtype
""",
    ),
    (
        "counter.py",
        "--count 4",
        """
crashed: lost at 4
counter [(]System[)] running
└─ counter [(]Counter[)] running, .*1 restart.*
1 2 3 4 1
""",
    ),
]


LOSS = re.compile(
    r"trio_accel\.devices: device \S+ lost its context of generation \d+.*; the next one starts .*"
)


# These examples configure no logging, and lose contexts.
LOSING = {
    "checkpoint.py",
    "cutlass_gemm.py",
    "digits_cnn.py",
    "embeddings.py",
    "hash_join.py",
    "heat.py",
    "onnx_model.py",
    "own_program.py",
    "surviving_worker.py",
}


def run(arguments: Sequence[str], folder: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", str(EXAMPLES / arguments[0]), *arguments[1:]],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=50,
        check=False,
    )
    # Each lost context is one line, and nothing else is written there.
    losses = [line for line in done.stderr.splitlines() if LOSS.fullmatch(line)]
    errors = [line for line in done.stderr.splitlines() if line not in losses]
    assert (done.returncode, errors) == (0, [])
    assert bool(losses) is (arguments[0] in LOSING and "--help" not in arguments)
    assert list(folder.glob("*.png")) == []
    return done.stdout


@pytest.mark.parametrize(("name", "arguments", "output"), RUNS, ids=[name for name, _, _ in RUNS])
def test_output(name: str, arguments: str, output: str, tmp_path: Path) -> None:
    if name in ISOLATED and sys.platform != "linux":
        pytest.skip("the CPU backend has worker processes on Linux only")
    printed = run([name, *arguments.split()], tmp_path)
    assert re.fullmatch(output, f"\n{printed}"), printed


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes are on Linux only")
def test_a_simulation_is_fitted_with_three_kills(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    options = "--size 16 --steps 4 --iterations 24 --kills 3 --out letters.png"
    done = subprocess.run(
        [sys.executable, str(EXAMPLES / "fit_simulation.py"), *options.split()],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        encoding="utf-8",
        timeout=50,
        check=True,
    )
    loss, bits = done.stdout.splitlines()
    assert float(loss.split()[3]) >= 1.3
    assert bits == "killed 3 times: the same bits"
    assert (tmp_path / "letters.png").stat().st_size > 1000


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes are on Linux only")
@pytest.mark.parametrize(("library", "package"), [("torch", "torch"), ("array_api", "array_api_compat")])
def test_the_same_function_in_other_libraries(library: str, package: str, tmp_path: Path) -> None:
    pytest.importorskip(package)
    printed = run(["nearest.py", "--library", library], tmp_path)
    assert printed.endswith("centres and distances: right\n")


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes are on Linux only")
def test_training_by_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    printed = run(["train_digits.py", "--by", "torch", "--steps", "8", "--quiet"], tmp_path)
    assert printed.endswith(", right\n")
    printed = run(["train_gpt.py", "--steps", "4", "--quiet"], tmp_path)
    assert re.fullmatch(r"2 ranks: 4 steps from 0 on in [0-9.]+ s, 0 workers lost, loss [0-9.]+\n", printed)


def test_the_spectrum_of_a_file(tmp_path: Path) -> None:
    seconds = np.arange(16384) / 8192
    tones = 8000 * np.sin(2 * np.pi * 1024 * seconds) + 800 * np.sin(2 * np.pi * 2048 * seconds)
    wavfile.write(tmp_path / "tones.wav", 8192, np.stack([tones, tones], axis=1).astype(np.int16))
    printed = run(["spectrum.py", "tones.wav", "--count", "2", "--backend", "cpu"], tmp_path)
    # The second is a tenth of the first in amplitude: 20 dB.
    assert printed.splitlines()[:2] == ["  1024.0 Hz    0.0 dB", "  2048.0 Hz  -20.0 dB"]


@pytest.mark.skipif(sys.platform != "linux", reason="worker processes are for Linux")
@pytest.mark.parametrize("checks_first", [True, False])
def test_a_model_is_served_from_a_copy_of_its_file(tmp_path: Path, checks_first: bool) -> None:
    # A copy is renamed, and workers import the class from it all the same.
    copy_the_service(tmp_path / "mine.py", checks_first=checks_first)
    environment = {"PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", "PATH": os.environ["PATH"]}
    command = sys.executable, "mine.py", "--port", "0"
    with subprocess.Popen(
        command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            port = int((process.stdout or sys.stdin).readline().removeprefix("serving on port "))

            def ask(data: str | bytes, **headers: str) -> tuple[int, object]:
                url = f"http://127.0.0.1:{port}/predict"
                sent = {name.replace("_", "-"): value for name, value in headers.items()}
                sent["content-type"] = "application/json"
                response = httpx2.post(url, content=data, headers=sent, timeout=20.0, trust_env=False)
                return response.status_code, response.json()

            right = 200, {"distances": [5.0, pytest.approx(17**0.5), 3.0]}
            assert ask("[3, 4]") == right
            assert ask("[3, 4]", x_deadline="0.000001") == (504, {"error": "the deadline has passed"})
            check_bad(ask, checks_first=checks_first)
            # Invalid protocols end their own connection.
            for data in (b"\0" * 99, b"GET / HTTP/1.1\r\nUpgrade: h2c\r\nHTTP2-Settings: AAAA\r\n\r\n"):
                with socket.create_connection(("127.0.0.1", port), 5) as client:
                    client.sendall(data)
            for data in HTTP_2:
                check_http_2(port, data)
            for worker in workers_of(process.pid):
                os.kill(worker, signal.SIGKILL)
            assert ask("[3, 4]") == right
            shown = httpx2.get(f"http://127.0.0.1:{port}/health", trust_env=False).json()
            assert (shown["status"], shown["faults"]) == ("alive", [])
            [device] = shown["devices"].values()
            assert device["pid"] in workers_of(process.pid)
            # The spare may also have taken over before it was killed.
            assert device["generation"] in (2, 3)
            check_given_up(process.pid, port)
            if not checks_first:
                check_end(ask, port)
            again = subprocess.run(
                (*command[:3], str(port)),
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                check=False,
            )
            assert (again.returncode, again.stdout) == (1, "")
            # On a busy machine, a line about a held loop comes first.
            *_, refusal = again.stderr.splitlines()
            assert refusal == f"cannot listen at port {port} of 127.0.0.1: Address already in use"
            process.send_signal(signal.SIGINT)
            _, told = process.communicate(timeout=20)
        finally:
            process.kill()
    assert process.returncode == 0
    assert "Traceback" not in told
    assert ("allows 3 restarts within 60 s" in told) is not checks_first


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")
def test_the_product_of_cutlass_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass_library", reason="nvidia-cutlass is not installed")
    monkeypatch.syspath_prepend(str(EXAMPLES))
    cubin: bytes = importlib.import_module("cutlass_gemm").compile_cutlass("sm_90a")
    assert cubin.startswith(b"\x7fELF")
    assert b".text.linear_relu" in cubin


def copy_the_service(path: Path, *, checks_first: bool) -> None:
    source = (EXAMPLES / "serve_a_model.py").read_text(encoding="utf-8")
    if not checks_first:
        # Then the model meets the bad rows, and refuses them.
        source = source.replace("tuple[FiniteFloat, FiniteFloat]", "list[FiniteFloat]")
        # And it has a bug, which it does not mention.
        source = source.replace(
            "        return ((np", "        assert rows != [[0.0, 0.0]]\n        return ((np"
        )
    path.write_text(source, encoding="utf-8")


def check_bad(ask: Callable[..., tuple[int, object]], *, checks_first: bool) -> None:
    """Send bodies without points: FastAPI refuses them by 422, and the model by 400."""
    assert ask("1" * 501)[0] == 413
    assert ask("[3, 4]", x_deadline="soon")[0] == 400
    assert ask("[1, 2, 3]")[0] == (422 if checks_first else 400)
    for bad in ("", "x", '["a", 1]', "null", "[NaN, 1]", f"[1, 1{'0' * 400}]", b"\xff"):
        assert ask(bad)[0] in {400, 422}


def check_end(ask: Callable[[str], tuple[int, object]], port: int) -> None:
    """Have the model fail too often."""
    for _ in range(6):
        assert ask("[0, 0]")[0] == 503
    health = httpx2.get(f"http://127.0.0.1:{port}/health", trust_env=False)
    assert (health.status_code, health.json()["faults"]) == (503, ["program 'distances-1' has ended"])


def check_given_up(pid: int, port: int) -> None:
    """Kill each worker before it is whole, until the device is given up; it comes back on its own."""

    def state(path: str) -> httpx2.Response:
        return httpx2.get(f"http://127.0.0.1:{port}/{path}", trust_env=False)

    until = time.monotonic() + 100.0
    while "was given up" not in (refused := state("ready")).text:
        assert time.monotonic() < until
        for worker in workers_of(pid):
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
    assert refused.status_code == 503
    assert "was killed by SIGKILL" in refused.text
    # It comes back without a restart of the program.
    assert state("health").status_code == 200
    while state("ready").status_code != 200:
        assert time.monotonic() < until
        time.sleep(0.05)


def workers_of(pid: int) -> list[int]:
    """The worker processes below a process: the children of its launcher that serve."""
    found: list[int] = []
    # A process may end while it is looked at.
    with suppress(FileNotFoundError, ProcessLookupError):
        if Path(f"/proc/{pid}/comm").read_text(encoding="ascii").strip() == "accel worker":
            found.append(pid)
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in (thread / "children").read_text(encoding="ascii").split():
                found += workers_of(int(child))
    return found


def test_every_example_is_short_and_run_by_a_test() -> None:
    tests = "".join(
        path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("test_*examples.py")
    )
    programs = sorted(EXAMPLES.glob("*.py"))
    assert {name for name, _, _ in RUNS} <= {path.name for path in programs}
    for path in programs:
        source = path.read_text(encoding="utf-8")
        assert len(source.splitlines()) <= LONGEST.get(path.name, 80), path.name
        assert source.startswith('"""'), path.name
        assert "trio_accel.cli" not in source
        # `blend.py` runs its module.
        assert f'"{USED.get(path.name, path.name)}"' in tests, f"no test runs {path.name}"


@pytest.mark.parametrize(
    "name", [*(name for name, _, _ in RUNS), "serve_a_model.py", "server_sent_events.py"]
)
def test_help(name: str, tmp_path: Path) -> None:
    assert run([name, "--help"], tmp_path).startswith(f"usage: {name} ")
