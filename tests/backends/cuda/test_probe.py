"""The backend's reports of a machine with something missing, from the driver to a single library."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from chosen import ROOT, SEARCHED
from surroundings import LIBRARIES, Machine, compile_library, make_library

from trio_accel.backends import describe, list_devices, resolve
from trio_accel.backends.base import NotSupportedError
from trio_accel.backends.cuda import CudaBackend, _installed, _probe, manifest

pytestmark = pytest.mark.no_device

EVERYTHING = tuple(sorted(name for name, entry in manifest.LIBRARIES.items() if entry.has_package))
CUDA13 = "pip install '.[cuda13]' in a checkout"
CUDA12 = "pip install '.[cuda12]' in a checkout"


def refusal(spec: str = "cuda") -> str:
    """The error of opening a device, if only the CPU is left."""
    assert [info.name for info in list_devices()] == ["cpu:0"]
    assert resolve(None)[1].name == "cpu:0"
    with pytest.raises(NotSupportedError) as caught:
        resolve(spec)
    text = str(caught.value)
    assert caught.value.backend == "cuda"
    assert text.startswith(f"{spec!r}: ")
    assert text.endswith("; available: cpu:0")
    assert "\n" not in text
    return text.removeprefix(f"{spec!r}: ").removesuffix("; available: cpu:0")


@pytest.fixture(autouse=True)
def _no_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRIO_ACCEL_BACKEND", raising=False)


@pytest.fixture
def bare(machine: Machine) -> Machine:
    """A machine on which nothing of CUDA is found but what the test puts there."""
    machine.add_driver()
    if any(one.source is not None for one in _installed.installed((13, 0)).software):
        pytest.skip("libraries of CUDA are installed here: none can be missing")
    _installed.installed.cache_clear()
    return machine


class TestDriver:
    def test_there_is_none(self, driverless: Machine) -> None:
        assert refusal().startswith("there is no NVIDIA driver here (libcuda.so.1 was not found)")
        assert "docker run --gpus all" in refusal()

    def test_its_file_is_damaged(self, machine: Machine) -> None:
        (machine.folder / "libcuda.so.1").write_bytes(b"no library")
        assert "the NVIDIA driver cannot be loaded (" in refusal()
        assert "reinstall it" in refusal()

    @pytest.mark.parametrize(
        ("code", "name", "advice"),
        [
            (999, "CUDA_ERROR_UNKNOWN", "reboot"),
            (802, "CUDA_ERROR_SYSTEM_NOT_READY", "nvidia-fabricmanager"),
            (803, "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "reboot"),
            (804, "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "LD_LIBRARY_PATH"),
            (46, "CUDA_ERROR_DEVICE_UNAVAILABLE", "another process"),
            (34, "CUDA_ERROR_STUB_LIBRARY", "LD_LIBRARY_PATH"),
            (3, "CUDA_ERROR_NOT_INITIALIZED", "nvidia-smi"),
        ],
    )
    def test_it_does_not_start(
        self, equipped: Machine, monkeypatch: pytest.MonkeyPatch, code: int, name: str, advice: str
    ) -> None:
        monkeypatch.setenv("STAND_IN_INIT_ERROR", str(code))
        text = refusal()
        assert text.startswith(f"the NVIDIA driver does not start ({name}): ")
        assert advice in text

    @pytest.mark.parametrize("code", ["802", "46"])
    def test_transient_failures_are_asked_again(
        self, equipped: Machine, monkeypatch: pytest.MonkeyPatch, code: str
    ) -> None:
        monkeypatch.setenv("STAND_IN_INIT_ERROR", code)
        assert refusal()
        monkeypatch.delenv("STAND_IN_INIT_ERROR")
        assert resolve(None)[1].name == "cuda:0"

    def test_permanent_failures_are_asked_once(
        self, equipped: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("STAND_IN_INIT_ERROR", "999")
        first = refusal()
        monkeypatch.delenv("STAND_IN_INIT_ERROR")
        assert refusal() == first

    def test_it_is_too_old(self, equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAND_IN_VERSION", "11080")
        assert refusal() == (
            "the NVIDIA driver is for CUDA 11.8, and 12.0 is needed: install driver 525 or later"
        )

    def test_it_is_older_than_the_bindings(self, equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        if int(_bindings().partition(".")[0]) < 13:
            pytest.skip("the bindings are for CUDA 12")
        monkeypatch.setenv("STAND_IN_VERSION", "12080")
        text = refusal()
        assert text.startswith("the NVIDIA driver is for CUDA 12.8, and cuda-bindings 13.")
        assert text.endswith(f" needs one for CUDA 13: {CUDA12}, or install a newer driver")

    def test_it_hangs(self, machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        hanging = "#include <unistd.h>\nint cuInit() { return pause(); }"
        compile_library(machine.folder / "libcuda.so.1", hanging)
        monkeypatch.setattr(_probe, "_PROBE_TIMEOUT", 0.3)
        assert refusal().startswith(
            "a process that asked the NVIDIA driver for its GPUs did not answer within"
        )

    def test_it_crashes(self, machine: Machine) -> None:
        compile_library(machine.folder / "libcuda.so.1", "int cuInit() { __builtin_trap(); }")
        text = refusal()
        assert text.startswith("a process that asked the NVIDIA driver for its GPUs crashed (SIGILL)")
        assert "nvidia-smi" in text

    def test_functions_are_missing(self, machine: Machine) -> None:
        compile_library(machine.folder / "libcuda.so.1", "int cuInit() { return 0; }")
        assert "ended with code 1 (AttributeError: " in refusal()
        assert "cuDriverGetVersion" in refusal()


class TestDevices:
    @pytest.mark.parametrize("visible", ["", "-1", "7", "no such", "GPU-0"])
    def test_the_environment_leaves_no_device(
        self, equipped: Machine, monkeypatch: pytest.MonkeyPatch, visible: str
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert refusal() == (
            f"the setting CUDA_VISIBLE_DEVICES={visible!r} leaves the NVIDIA driver no GPU; unset it, or "
            "name one that is there"
        )
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        assert [info.name for info in list_devices()] == ["cuda:0", "cpu:0"]
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
        assert [info.name for info in list_devices()] == ["cuda:0", "cuda:1", "cpu:0"]

    def test_there_is_none(self, equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAND_IN_DEVICES", "0")
        assert refusal("cuda:1").startswith("the NVIDIA driver finds no GPU; see whether `nvidia-smi` does")

    def test_none_of_that_number(self, equipped: Machine) -> None:
        with pytest.raises(ValueError, match=r"'cuda:7': the device does not exist") as caught:
            resolve("cuda:7")
        assert str(caught.value).endswith("available: cuda:0, cuda:1, cpu:0")

    def test_none_allows_a_context(self, equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAND_IN_COMPUTE_MODE", "2")
        assert "is in compute mode 'prohibited'; nvidia-smi -c DEFAULT ends that" in refusal()

    def test_another_process_has_it(self, equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("STAND_IN_COMPUTE_MODE", "3")
        monkeypatch.setenv("STAND_IN_DEVICES", "1")
        with _context_elsewhere():
            text = refusal()
            assert "is in compute mode 'exclusive process', and another process has it" in text
            assert "nvidia-smi" in text
        # It is free again, and nobody needs to start again.
        info = resolve("cuda")[1]
        assert (info.name, info.is_exclusive) == ("cuda:0", True)

    def test_an_unusable_device_is_reported_by_its_number_with_the_reason(
        self, monkeypatch: pytest.MonkeyPatch, forget_probes: None
    ) -> None:
        devices = [device(), device(compute_mode=2), device(has_virtual_memory=0)]
        monkeypatch.setattr(_probe, "ask", lambda *_: {"version": 13000, "devices": devices})
        monkeypatch.setattr(_installed, "ask", lambda *_: found())
        assert [info.name for info in list_devices()] == ["cuda:0", "cpu:0"]
        with pytest.raises(NotSupportedError, match="'cuda:1': the GPU is in compute mode 'prohibited'"):
            resolve("cuda:1")
        with pytest.raises(NotSupportedError, match="'cuda:2': the GPU has no virtual memory management"):
            resolve("cuda:2")
        assert CudaBackend().unavailable_reason() is None

    @pytest.mark.parametrize(
        ("digits", "uuid"),
        [
            ("57a4d14e000040008000000000000001", "GPU-57a4d14e-0000-4000-8000-000000000001"),
            ("00" * 16, None),
            ("00", None),
        ],
    )
    def test_it_has_the_uuid_that_others_know_it_by(
        self, monkeypatch: pytest.MonkeyPatch, forget_probes: None, digits: str, uuid: str | None
    ) -> None:
        devices = [device(uuid=digits)]
        monkeypatch.setattr(_probe, "ask", lambda *_: {"version": 13000, "devices": devices})
        monkeypatch.setattr(_installed, "ask", lambda *_: found())
        assert [info.uuid for info in CudaBackend().list_devices()] == [uuid]

    def test_the_environment_chooses_one_and_it_has_its_own_uuid(
        self, equipped: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        second = CudaBackend().list_devices()[1].uuid
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
        [info] = CudaBackend().list_devices()
        assert (info.name, info.uuid) == ("cuda:0", second)
        assert second == "GPU-57a4d14e-0000-4000-8000-000000000001"

    def test_one_is_too_old_for_the_libraries(
        self, monkeypatch: pytest.MonkeyPatch, forget_probes: None
    ) -> None:
        old = device(major=7, minor=0)
        monkeypatch.setattr(_probe, "ask", lambda *_: {"version": 13000, "devices": [old]})
        monkeypatch.setattr(_installed, "ask", lambda *_: found())
        assert refusal() == (
            f"the GPU has compute capability 7.0, which CUDA 13 does not know any longer: {CUDA12}"
        )


class TestLibraries:
    def test_all_are_there(self, bare: Machine) -> None:
        bare.add()
        cuda = describe()[0]
        assert cuda.problem is None
        assert [device.libraries for device in cuda.devices] == [EVERYTHING] * 2
        driver, *libraries, front_end = cuda.software
        assert (front_end.name, front_end.needed_by) == ("cuDNN front end", ("dnn",))
        assert (driver.name, driver.source) == ("NVIDIA driver", "system")
        assert driver.version is not None
        assert driver.version.rstrip(")").endswith("CUDA 13.0")
        found = {one.name: (one.version, one.source, one.path) for one in libraries}
        folder = bare.folder
        assert found == {
            "NVRTC": ("13.0", "system", str(folder / "libnvrtc.so.13")),
            "cuBLAS": ("13.1.2", "system", str(folder / "libcublas.so.13")),
            "cuFFT": ("12.0.1", "system", str(folder / "libcufft.so.12")),
            "cuSOLVER": ("12.0.4", "system", str(folder / "libcusolver.so.12")),
            "cuSPARSE": ("12.6.3", "system", str(folder / "libcusparse.so.12")),
            "cuDNN": ("9.19.0", "system", str(folder / "libcudnn.so.9")),
            "cuTENSOR": ("2.5.0", "system", str(folder / "libcutensor.so.2")),
        }

    @pytest.mark.parametrize(
        ("version", "says"),
        [
            (None, "is not installed, so convolutions and attention take up to 10 and 37 times as long: "),
            ("1.32.0", "is not of 1.22, so convolutions and attention take up to 10 and 37 times as long: "),
            ("1.22.1", None),
        ],
    )
    def test_the_front_end_of_cudnn(
        self, bare: Machine, monkeypatch: pytest.MonkeyPatch, version: str | None, says: str | None
    ) -> None:
        def found(name: str) -> str:
            assert name == "nvidia-cudnn-frontend"
            if version is None:
                raise metadata.PackageNotFoundError(name)
            return version

        monkeypatch.setattr(_installed.metadata, "version", found)
        bare.add()
        libraries = _installed.installed((13, 0))
        assert libraries.software[-1].version == version
        assert libraries.software[-1].problem == (says and says + CUDA13)
        assert libraries.libraries == EVERYTHING

    def test_the_front_end_is_that_of_the_extras(self) -> None:
        text = (ROOT / "pyproject.toml").read_text()
        bounds = set(re.findall(r"nvidia-cudnn-frontend>=(\d+)\.(\d+)[\d.]*,<(\d+)\.(\d+)", text))
        first, second = manifest.FRONT_END
        assert bounds == {(str(first), str(second), str(first), str(second + 1))}

    @pytest.mark.parametrize("variable", ["CONDA_PREFIX", "CUDA_PATH"])
    def test_they_are_found_on_the_path_of_the_bindings(
        self, bare: Machine, monkeypatch: pytest.MonkeyPatch, made_libraries: Path, variable: str
    ) -> None:
        prefix = bare.folder.parent / "prefix"
        prefix.mkdir()
        (prefix / "lib").symlink_to(made_libraries)
        monkeypatch.setenv(variable, str(prefix))
        _, nvrtc, *_ = describe()[0].software
        assert nvrtc.version == "13.0"
        assert nvrtc.path is not None
        assert (prefix / "lib" / "libnvrtc.so.13").samefile(nvrtc.path)
        assert nvrtc.source == {"CONDA_PREFIX": "conda", "CUDA_PATH": "CUDA_PATH"}[variable]

    def test_there_are_no_libraries(self, bare: Machine) -> None:
        assert refusal() == (f"the NVIDIA driver is there, but CUDA's libraries are not installed: {CUDA13}")

    def test_without_the_compiler_there_is_no_device(self, bare: Machine) -> None:
        bare.add(set(LIBRARIES) - {"nvrtc"})
        assert refusal() == f"NVRTC, by which kernels are compiled, is not installed: {CUDA13}"

    @pytest.mark.parametrize(
        ("missing", "needing"),
        [
            # cuSOLVER needs all of the others but cuFFT.
            ("cublas", {**dict.fromkeys(("blas", "blaslt", "tensor"), "cuBLAS"), "solver": "cuSOLVER"}),
            ("cublasLt", {**dict.fromkeys(("blas", "blaslt", "tensor"), "cuBLAS"), "solver": "cuSOLVER"}),
            ("cufft", {"fft": "cuFFT"}),
            # Convolutions and attention do without.
            ("cudnn", {}),
            # So do contractions.
            ("cutensor", {}),
            ("cusolver", {"solver": "cuSOLVER"}),
            ("cusparse", {"sparse": "cuSPARSE", "solver": "cuSOLVER"}),
            ("nvJitLink", {"sparse": "cuSPARSE", "solver": "cuSOLVER"}),
        ],
    )
    def test_without_one_the_others_are_there(
        self, bare: Machine, missing: str, needing: dict[str, str]
    ) -> None:
        bare.add(set(LIBRARIES) - {missing})
        libraries = _installed.installed((13, 0))
        assert set(libraries.libraries) == set(EVERYTHING) - set(needing)
        for library, name in needing.items():
            assert libraries.problem(library) == (
                f"library {library!r} needs {name}, which is not installed: {CUDA13}"
            )
        assert resolve("cuda")[1].name == "cuda:0"

    def test_one_is_damaged(self, bare: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
        # One that the loader itself would skip: the bindings load this one by its path.
        bare.add(set(LIBRARIES) - {"cufft"})
        prefix = bare.folder.parent / "prefix"
        (prefix / "lib").mkdir(parents=True)
        (prefix / "lib" / "libcufft.so.12").write_bytes(b"no library")
        monkeypatch.setenv("CUDA_PATH", str(prefix))
        problem = _installed.installed((13, 0)).problem("fft")
        assert problem is not None
        assert "which cannot be loaded (" in problem
        assert problem.endswith(f"reinstall it: {CUDA13}")

    def test_one_is_of_a_newer_cuda(self, bare: Machine) -> None:
        bare.add(set(LIBRARIES) - {"cublas", "cufft"})
        make_library(bare.folder, "cublas", "14, 0, 1")
        make_library(bare.folder, "cufft", "13, 0, 0")
        libraries = _installed.installed((13, 0))
        assert libraries.libraries == tuple(
            [one for one in EVERYTHING if one not in ("blas", "blaslt", "fft", "tensor")]
        )
        of_cublas = [(library, "cuBLAS") for library in ("blas", "blaslt", "tensor")]
        for library, name in (*of_cublas, ("fft", "cuFFT")):
            assert libraries.problem(library) == (
                f"library {library!r} needs {name}, which is for CUDA 14, and the NVIDIA driver for "
                f"CUDA 13.0: {CUDA13}, or install a newer driver"
            )

    def test_looking_for_them_crashes(self, bare: Machine) -> None:
        bare.add(set(LIBRARIES) - {"cufft"})
        source = "__attribute__((constructor)) void start() { __builtin_trap(); }"
        compile_library(bare.folder / "libcufft.so.12", source)
        assert refusal() == (
            f"a process that loaded CUDA's libraries crashed (SIGILL); install them anew: {CUDA13}"
        )

    @pytest.mark.parametrize("text", ["raise ImportError('libX.so: undefined symbol')", "import no_such"])
    def test_the_bindings_cannot_be_imported(
        self, equipped: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
    ) -> None:
        package = tmp_path / "broken" / "cuda" / "bindings"
        package.mkdir(parents=True)
        for folder, content in ((package.parent, ""), (package, text)):
            (folder / "__init__.py").write_text(content)
        monkeypatch.syspath_prepend(str(package.parents[1]))
        reason = refusal()
        assert reason.startswith("cuda-bindings cannot be imported (")
        assert "reinstall it: pip install --force-reinstall --no-deps cuda-bindings" in reason

    def test_the_bindings_are_not_installed(
        self, equipped: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "empty" / "cuda").mkdir(parents=True)
        (tmp_path / "empty" / "cuda" / "__init__.py").touch()
        monkeypatch.syspath_prepend(str(tmp_path / "empty"))
        assert refusal() == f"cuda-bindings is not installed: {CUDA13}"

    def test_this_process_loads_no_library(self, equipped: Machine) -> None:
        before = _mapped()
        assert describe()[0].problem is None
        assert {
            path for path in _mapped() - before if "cuda" in path or str(equipped.folder) in path
        } == set()


class TestOpening:
    @pytest.mark.parametrize("isolation", ["inline", pytest.param("process", marks=pytest.mark.slow)])
    def test_a_missing_library_is_refused_by_the_actor(
        self, bare: Machine, variables: Callable[..., dict[str, str]], isolation: str
    ) -> None:
        bare.add(set(LIBRARIES) - {"cufft"})
        _link_stand_ins(bare, "libnvrtc.so.13")
        text = _run(
            f"""
device = await system.open_device("cuda", options=ta.DeviceOptions(isolation={isolation!r}))
print(device.libraries)
x = await device.put(np.arange(4.0))
try:
    await ta.fft.fft(x)
except ta.NotSupportedError as error:
    print(error.message)
print(await x.to_host())
""",
            variables(),
        )
        assert text.splitlines() == [
            str(tuple([one for one in EVERYTHING if one != "fft"])),
            f"fft.fft: library 'fft' needs cuFFT, which is not installed: {CUDA13}",
            "[0. 1. 2. 3.]",
        ]

    @pytest.mark.slow
    @pytest.mark.parametrize("isolation", ["inline", "process"])
    def test_another_process_was_quicker(
        self, equipped: Machine, variables: Callable[..., dict[str, str]], isolation: str
    ) -> None:
        _link_stand_ins(equipped, "libnvrtc.so.13")
        text = _run(
            f"""
import logging, os, subprocess, sys
os.environ.pop("TRIO_ACCEL_BACKEND", None)
options = ta.DeviceOptions(isolation={isolation!r})
assert [info.name for info in ta.list_devices()] == ["cuda:0", "cpu:0"]
with subprocess.Popen([sys.executable, "-c", {_HOLDER!r}], stdin=-1, stdout=-1) as holder:
    holder.stdout.readline()
    try:
        await system.open_device("cuda", options=options)
    except ta.NotSupportedError as error:
        print(error.message)
    logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
    other = await system.open_device(options=options)
    print(other.info.name, await (await other.put(np.arange(3.0))).to_host())
    holder.stdin.close()
device = await system.open_device("cuda", options=options)
print(device.info.name)
""",
            variables(STAND_IN_COMPUTE_MODE="3", STAND_IN_DEVICES="1"),
        )
        refused, warned, other, opened = text.splitlines()
        assert "is in compute mode 'exclusive process', and another process has it" in refused
        # A caller without a name continues with the next best, and gets a warning.
        assert warned == f"WARNING cuda:0 was found, but cannot be opened: {refused}"
        assert other == "cpu:0 [0. 1. 2.]"
        assert opened == "cuda:0"


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["poison=True", "kill=True"])
def test_in_exclusive_mode_there_are_no_spares_and_workers_follow_one_another(
    equipped: Machine, variables: Callable[..., dict[str, str]], fault: str
) -> None:
    _link_stand_ins(equipped, "libnvrtc.so.13")
    text = _run(
        f"""
import os
from trio_accel.devices import Copy
os.environ.pop("TRIO_ACCEL_BACKEND", None)
# An option that it does not have is not a reason to go on with another, if none is named.
for spec in "cuda", None:
    try:
        await system.open_device(spec, options=ta.DeviceOptions(spares=1))
    except ta.NotSupportedError as error:
        print(error.message)
device = await system.open_device("cuda")
x = await device.put(np.arange(3.0))
for _ in range(3):
    ta.testing.inject_fault(device, Copy, {fault})
    try:
        await x.copy()
    except ta.ContextLostError as error:
        print("lost with", error.generation, await x.to_host())
""",
        variables(STAND_IN_COMPUTE_MODE="3", STAND_IN_DEVICES="1"),
    )
    refused, again, *lost = text.splitlines()
    assert "spares=1: cuda:0 is in exclusive compute mode and takes one process at a time" in refused
    assert again == refused
    assert lost == [f"lost with {generation} [0. 1. 2.]" for generation in (1, 2, 3)]


def test_bindings_of_libraries_that_cannot_be_imported_are_named(
    equipped: Machine, variables: Callable[..., dict[str, str]]
) -> None:
    _link_stand_ins(equipped, "libnvrtc.so.13")
    text = _run(
        """
import sys
sys.modules["nvmath"] = None
device = await system.open_device("cuda", options=ta.DeviceOptions(isolation="inline"))
x = await device.put(np.arange(4.0))
try:
    await ta.fft.fft(x)
except ta.NotSupportedError as error:
    print(error.message)
print(await x.to_host())
""",
        variables(),
    )
    refused, host = text.splitlines()
    needs = r"fft\.fft: library 'fft' needs nvmath(\.bindings)?, which cannot be imported \("
    assert re.match(needs, refused)
    assert refused.endswith("pip install --force-reinstall --no-deps nvmath-python cuda-core")
    assert host == "[0. 1. 2. 3.]"


_HOLDER = """
import ctypes, sys
driver = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()
assert driver.cuInit(0) == 0
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
print("it has it", flush=True)
sys.stdin.read()
"""


class _context_elsewhere:  # noqa: N801  # reads as what it is
    """Another process has a context on the first device."""

    def __enter__(self) -> None:
        command = [sys.executable, "-c", _HOLDER]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"it has it\n"

    def __exit__(self, *_: object) -> None:
        self._process.communicate()
        assert self._process.returncode == 0


def _run(body: str, environment: dict[str, str]) -> str:
    lines = "\n".join(f"        {line}" for line in body.strip().splitlines())
    program = f"""
import numpy as np, trio
import trio_accel as ta
async def main():
    async with ta.open_system("test") as system:
{lines}
trio.run(main)
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environment, "PYTHONPATH": SEARCHED},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def _link_stand_ins(machine: Machine, *files: str) -> None:
    for path in machine.stand_in.libraries:
        if path.name in files:
            (machine.folder / path.name).unlink()
            (machine.folder / path.name).symlink_to(path)


def _mapped() -> set[str]:
    """Files that this process has in its memory."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    return {fields[5] for line in lines if len(fields := line.split(maxsplit=5)) == 6}


def _bindings() -> str:
    from importlib.metadata import version

    return version("cuda-bindings")


def device(**changes: object) -> dict[str, object]:
    """The driver's attributes of a device."""
    facts: dict[str, object] = {
        "name": "GPU",
        "uuid": "00",
        "total_memory": 1 << 30,
        "context": None,
        "multiprocessors": 10,
        "compute_mode": 0,
        "major": 9,
        "minor": 0,
        "has_virtual_memory": 1,
        "has_descriptors": 1,
    }
    return {**facts, **changes}


def found() -> dict[str, object]:
    """The result if all libraries of CUDA 13 are installed."""
    versions = {"nvrtc": [13, 0], "cublas": [13, 0, 0], "cufft": [12, 0, 0]}
    versions |= {"cusolver": [12, 0, 4], "cusparse": None, "cudnn": [9, 19, 0], "cutensor": [2, 5, 0]}
    return {
        "bindings": "13.0.0",
        "found": {
            name: {"path": f"/lib/{name}.so", "source": "site-packages", "version": version}
            for name, version in versions.items()
        },
    }
