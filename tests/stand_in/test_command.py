"""The command runs users' programs on the stand-in, and reports missing functions."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from chosen import ROOT, SEARCHED
from pages import blocks

import trio_accel.testing.stand_in as package
from trio_accel.testing.stand_in import BuildError, StandIn, build, is_available

COMMAND = (sys.executable, "-m", "trio_accel.testing.stand_in")
PAGE = ROOT / "docs" / "guide" / "cuda.md"
SOURCES = sorted(path for pattern in ("*.c", "*.cpp") for path in Path(package.__file__).parent.glob(pattern))

OPENING = """
import sys
import numpy as np
import trio
import trio_accel as ta
from trio_accel import jit

async def main():
    options = ta.DeviceOptions(isolation=sys.argv[1])
    async with ta.open_system("app") as system, system.open_device("cuda", options=options) as device:
        x = await device.put(np.eye(4, dtype=np.float32))
        kernel = jit.Kernel("k", SOURCE, parameters={"x": jit.updates("float32")}, grid=1, block=32)
        LINE

trio.run(main)
"""

Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def command(stand_in: StandIn, tmp_path: Path) -> Run:
    """Runs the command in a folder of its own."""

    def run(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        own = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
        return subprocess.run(
            [*COMMAND, *arguments],
            env={**own, "PYTHONPATH": SEARCHED, **variables},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    return run


@pytest.mark.slow
def test_the_program_of_the_guide_prints_the_shown_output(command: Run, tmp_path: Path) -> None:
    found = blocks(PAGE)
    first = next(number for number, block in enumerate(found) if "saxpy = jit.Kernel" in block.text)
    program, _, output = found[first : first + 3]
    (tmp_path / "saxpy.py").write_text(program.text, encoding="utf-8")
    done = command("saxpy.py")
    assert (done.returncode, done.stdout, done.stderr) == (0, output.text, "")


@pytest.mark.slow
def test_the_tests_of_a_user_run_on_it(command: Run, tmp_path: Path) -> None:
    (tmp_path / "test_own.py").write_text(
        "import numpy as np\n"
        "import trio_accel as ta\n"
        "async def test_a_product(device: ta.Device) -> None:\n"
        "    assert device.info.description == 'Stand-in H200'\n"
        "    x = np.arange(6.0).reshape(2, 3)\n"
        "    product = await ta.linalg.matmul(await device.put(x), x.T)\n"
        "    np.testing.assert_allclose(await product.to_host(), x @ x.T)\n"
    )
    pytest_alone = (
        "-m",
        "pytest",
        "-q",
        "-c",
        os.devnull,
        "--rootdir",
        str(tmp_path),
        "-o",
        "trio_mode=true",
    )
    done = command(
        *pytest_alone, "-p", "trio_accel.testing.fixtures", "test_own.py", TRIO_ACCEL_BACKEND="cuda"
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 passed" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isolation", "line", "source", "refusal"),
    [
        (
            "process",
            "await ta.linalg.cholesky(x)",
            "",
            "NotSupportedError: linalg.cholesky: library 'solver' needs cuSOLVER, which the stand-in driver",
        ),
        (
            "inline",
            "await ta.linalg.trsm(1.0, x, x)",
            "",
            "cublasStrsm_v2_64 is not found; the vendor's library is too old, or is the stand-in driver's (",
        ),
        (
            "process",
            "await kernel(x)",
            'extern "C" __global__ void k(float* x) {\n    __shared__ float t[32]; *x = *t;\n}',
            "k.cu:2:11: error: the stand-in driver runs threads one by one, and has no shared memory",
        ),
        (
            "inline",
            "await kernel(x)",
            'extern "C" __global__ void k(float* x) {\n    __syncthreads();\n}',
            "k.cu:2:11: error: the stand-in driver runs threads one by one, and has no __syncthreads",
        ),
        (
            "inline",
            "await kernel(x)",
            'extern "C" __global__ void k(float* x) { *x = __shfl_xor_sync(~0u, *x, 1); }',
            "error: the stand-in driver runs threads one by one, and has no such call of a warp",
        ),
        (
            "inline",
            "await kernel(x)",
            '#include <cuda_fp16.h>\nextern "C" __global__ void k(float* x) { __half y = *x; *x = y; }',
            "error:",  # without the headers of CUDA, the compiler misses the file
        ),
        (
            "process",
            "await kernel(x)",
            "ptx",
            "the stand-in driver takes what its own compiler made of CUDA C++, and no PTX or cubin",
        ),
    ],
    ids=["cusolver", "cublas", "shared", "syncthreads", "warp", "half", "ptx"],
)
def test_missing_functions_are_refused_in_a_sentence(
    command: Run, tmp_path: Path, isolation: str, line: str, source: str, refusal: str
) -> None:
    code = (
        'jit.ptx(".version 8.0")' if source == "ptx" else repr(source or 'extern "C" __global__ void k() {}')
    )
    program = OPENING.replace("SOURCE", code).replace("LINE", line)
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    done = command("program.py", isolation)
    assert done.returncode == 1
    assert refusal in done.stderr


@pytest.mark.slow
def test_libraries_installed_next_to_it_are_not_used(command: Run, tmp_path: Path) -> None:
    library = tmp_path / "libcusolver.so.12"
    source = "int cusolverGetProperty(int part, int *value) { *value = 12 * !part; return 0; }"
    gcc = ("gcc", "-shared", "-fPIC", "-x", "c", "-", f"-Wl,-soname,{library.name}", "-o", str(library))
    subprocess.run(gcc, input=source, text=True, check=True)
    program = OPENING.replace("SOURCE", "''").replace("LINE", "await ta.linalg.cholesky(x)")
    program = program.replace("kernel = jit", "pass  # ")
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    done = command("program.py", "inline", LD_LIBRARY_PATH=str(tmp_path))
    assert done.returncode == 1
    assert "library 'solver' needs cuSOLVER, which the stand-in driver does not have (" in done.stderr


def test_exit_codes_arguments_and_flags_belong_to_the_program(command: Run) -> None:
    done = command("-c", "import sys; print(sys.argv); sys.exit(7)", "--help", "a b")
    assert (done.returncode, done.stdout, done.stderr) == (7, "['-c', '--help', 'a b']\n", "")


@pytest.mark.slow
def test_flags_of_the_interpreter_are_passed_on(stand_in: StandIn) -> None:
    program = "import sys; print(sys.flags.utf8_mode, sys.flags.optimize)"
    flagged = (COMMAND[0], "-O", "-X", "utf8", *COMMAND[1:], "-c", program)
    done = subprocess.run(
        flagged, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": SEARCHED}
    )
    assert (done.stdout, done.stderr) == ("1 1\n", "")


def test_ctrl_c_is_that_of_the_program(stand_in: StandIn) -> None:
    program = (
        "import time\ntry: print('ready', flush=True); time.sleep(40)\nexcept KeyboardInterrupt: exit(5)"
    )
    running = subprocess.Popen(
        [*COMMAND, "-c", program], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": SEARCHED}
    )
    with running:
        assert running.stdout is not None
        assert running.stdout.readline() == b"ready\n"
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 5


@pytest.mark.parametrize("arguments", [(), ("--help",)])
def test_without_a_program_it_prints_its_usage(command: Run, arguments: tuple[str, ...]) -> None:
    done = command(*arguments)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("usage: python -m trio_accel.testing.stand_in (program.py |")


def test_without_a_compiler_it_names_the_package_to_install(command: Run, tmp_path: Path) -> None:
    done = command("-c", "print(1)", PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == (
        "the stand-in driver is compiled on Linux, with gcc and g++; install both, in Debian and Ubuntu by: "
        "apt install gcc g++\n"
    )


def test_bindings_for_cuda_12_are_refused(command: Run, tmp_path: Path) -> None:
    folder = tmp_path / "cuda_bindings-12.9.2.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: cuda-bindings\nVersion: 12.9.2\n")
    done = command("-c", "print(1)", PYTHONPATH=f"{tmp_path}{os.pathsep}{SEARCHED}")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "the stand-in driver is for CUDA 13: pip install 'cuda-bindings>=13,<14'\n"


@pytest.mark.skipif(not is_available(), reason="asks for compilers first")
def test_a_folder_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(package.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(BuildError, match=r"stand-in-\d+ belongs to another user; set TMPDIR to"):
        build()


@pytest.mark.skipif(not is_available(), reason="compiles")
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_sources_compile_without_a_warning(source: Path) -> None:
    compiler = ("gcc", "-std=gnu11") if source.suffix == ".c" else ("g++", "-std=c++17")
    strict = (
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wno-unused-parameter",
        "-fsyntax-only",
    )  # parameters: the vendor's
    done = subprocess.run([*compiler, *strict, str(source)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
