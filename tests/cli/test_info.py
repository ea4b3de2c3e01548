from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import attrs
import pytest
from machines.sitecustomize import MACHINES

import trio_accel as ta
from trio_accel.backends.base import BackendReport, DeviceReport, Software
from trio_accel.cli import _info

if TYPE_CHECKING:
    from command import Cli

pytestmark = pytest.mark.machine

NAMES = [machine.processor for machine in MACHINES.values()]


@pytest.fixture
def report(cli: Cli) -> dict[str, object]:
    done = cli("info", "--json")
    assert (done.code, done.err) == (0, "")
    document: dict[str, object] = json.loads(done.out)
    return document


def test_the_document(report: dict[str, object]) -> None:
    assert list(report) == [
        "command",
        "version",
        "devices",
        "links",
        "islands",
        "backends",
        "accelerator",
        "workers",
        "versions",
        "blas",
    ]
    assert (report["command"], report["version"]) == ("info", ta.__version__)


def test_every_device_is_there_with_its_libraries(report: dict[str, object]) -> None:
    devices = report["devices"]
    assert isinstance(devices, list)
    infos = ta.list_devices()
    assert [device["name"] for device in devices] == [info.name for info in infos]
    for device, info in zip(devices, infos, strict=True):
        assert list(device) == [
            "name",
            "backend",
            "description",
            "total_memory",
            "compute_units",
            "libraries",
            "properties",
        ]
        assert (device["total_memory"], device["compute_units"]) == (info.total_memory, info.compute_units)
        assert {"memory", "blas", "fft", "sparse"} <= set(device["libraries"])


def test_versions_match_the_installed_packages(report: dict[str, object]) -> None:
    versions = report["versions"]
    assert isinstance(versions, dict)
    assert versions["python"] == platform.python_version()
    for name in ("trio", "numpy", "scipy"):
        assert versions[name] == metadata.version(name)
    assert {"cuda-core", "cuda-bindings", "nvmath-python"} <= set(versions)


@pytest.mark.slow
def test_the_start_method_of_workers_is_shown_with_the_reason(
    cli: Cli, report: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert report["workers"] == "forks"
    monkeypatch.setenv("COLUMNS", "500")
    assert "workers forks" in " ".join(cli("info").out.split())
    monkeypatch.setenv("PYTHONOPTIMIZE", "1")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "")
        assert "none: worker processes need to know the path" in cli("info").out
    if not sys.flags.ignore_environment:
        assert "fresh interpreters: the interpreter has options" in cli("info").out


def test_numpys_blas_is_named(report: dict[str, object]) -> None:
    import numpy as np

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    assert report["blas"] == f"{blas['name']} {blas['version']}"


def test_it_explains_why_there_is_no_accelerator(cli: Cli, report: dict[str, object]) -> None:
    reason = report["accelerator"]
    if any(info.backend != "cpu" for info in ta.list_devices()):
        assert reason is None
    else:
        assert isinstance(reason, str)
        assert "NVIDIA driver" in reason
        assert f"no accelerator: {reason}\n" in cli("info").out


def test_every_backend_is_listed_with_its_missing_parts(report: dict[str, object]) -> None:
    backends = report["backends"]
    assert isinstance(backends, list)
    cuda, cpu = backends
    assert (cpu["name"], cpu["problem"], cpu["software"]) == ("cpu", None, [])
    assert cuda["name"] == "cuda"
    assert cuda["software"][0]["name"] == "NVIDIA driver"
    assert (cuda["problem"] is None) == any(info.backend == "cuda" for info in ta.list_devices())


def test_the_text_has_the_same_facts(
    cli: Cli, report: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")  # no name is folded
    done = cli("info")
    assert (done.code, done.err) == (0, "")
    text = " ".join(done.out.split())
    versions, devices = report["versions"], report["devices"]
    assert isinstance(versions, dict)
    assert isinstance(devices, list)
    for name, version in versions.items():
        assert f"{name} {version or 'not installed'}" in text
    for device in devices:
        assert f"{device['name']} {device['description']} {device['compute_units']}" in text


def test_no_cuda_package_is_imported(cli: Cli) -> None:
    before = {name for name in sys.modules if name.partition(".")[0] in ("cuda", "nvmath")}
    assert cli("info").code == 0
    after = {name for name in sys.modules if name.partition(".")[0] in ("cuda", "nvmath")}
    assert after == before


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """Two GPUs, one of them usable, and a missing library."""
    gpu = ta.DeviceInfo(
        backend="cuda",
        index=0,
        description="NVIDIA [H200]",
        total_memory=141 << 30,
        compute_units=132,
        isolations=("process", "inline"),
    )
    properties = (("compute capability", "9.0"), ("compute mode", "default"))
    backend = BackendReport(
        name="cuda",
        devices=(
            DeviceReport(info=gpu, libraries=("blas", "memory"), properties=properties),
            DeviceReport(info=attrs.evolve(gpu, index=1), problem="it is in compute mode 'prohibited'"),
        ),
        software=(
            Software(name="NVIDIA driver", version="580.1 (CUDA 13.0)", source="system"),
            Software(
                name="NVRTC", version="13.0", source="wheel", path="/venv/nvidia/cu13/lib/libnvrtc.so.13"
            ),
            Software(name="cuBLAS", source="wheel", path="/venv/nvidia/cu13/lib/b.so", needed_by=("blas",)),
            Software(name="cuFFT", needed_by=("fft",), problem="is not installed: pip install 'x[y]'"),
        ),
    )
    monkeypatch.setattr(_info, "describe", lambda: (backend, _cpu("AMD EPYC")))
    return attrs.asdict(backend)


def test_a_gpu_with_its_driver_and_libraries(cli: Cli, gpus: dict[str, object]) -> None:
    document = json.loads(cli("info", "--json").out)
    first, second = document["devices"]
    assert (first["name"], first["libraries"], second["name"]) == ("cuda:0", ["blas", "memory"], "cpu:0")
    assert first["properties"] == {"compute capability": "9.0", "compute mode": "default"}
    cuda, cpu = document["backends"]
    assert cuda["software"] == json.loads(json.dumps(gpus["software"]))
    assert cuda["unusable"] == [
        {"name": "cuda:1", "description": "NVIDIA [H200]", "problem": "it is in compute mode 'prohibited'"}
    ]
    assert (cuda["problem"], cpu["unusable"], document["accelerator"]) == (None, [], None)


@pytest.mark.parametrize("width", [80, 120])
def test_its_text_fits_the_terminal(
    cli: Cli, gpus: dict[str, object], monkeypatch: pytest.MonkeyPatch, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    done = cli("info")
    lines = [line.rstrip() for line in done.out.splitlines()]
    assert (done.code, done.err) == (0, "")
    assert max(map(len, lines)) <= width
    assert "cuda:0  NVIDIA [H200]  132    141.0 GiB  blas, memory" in lines
    assert "cuda:0  compute capability 9.0, compute mode default" in lines
    assert "NVIDIA driver  580.1 (CUDA 13.0)  system" in lines
    assert "NVRTC          13.0               wheel    /venv/nvidia/cu13/lib" in lines
    assert "cuBLAS (blas)                     wheel" in lines
    assert "cuFFT (fft)                       missing  is not installed: pip install 'x[y]'" in lines
    assert "cuda:1 cannot be used: it is in compute mode 'prohibited'" in lines


def test_how_devices_reach_one_another(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [attrs.evolve(_cpu("H200").devices[0].info, backend="cuda", index=index) for index in range(2)]
    link = ta.DeviceLink(devices=("cuda:0", "cuda:1"), kind="nvlink", has_peer_access=True, rank=0)
    topology = ta.Topology.of([*gpus, _cpu("AMD EPYC").devices[0].info], [link])
    monkeypatch.setattr(ta, "topology", lambda: topology)
    document = json.loads(cli("info", "--json").out)
    assert document["islands"] == [["cuda:0", "cuda:1"], ["cpu:0"]]
    assert [ta.DeviceLink(**{**one, "devices": tuple(one["devices"])}) for one in document["links"]] == list(
        topology.links
    )
    rows = [" ".join(line.split()) for line in cli("info").out.splitlines()]
    begin = rows.index("reaches cuda:0 cuda:1 cpu:0 island")
    assert rows[begin + 1 : begin + 4] == [
        "cuda:0 - NVLink host 0",
        "cuda:1 NVLink - host 0",
        "cpu:0 host host - 1",
    ]


def test_one_device_has_no_table_of_ways(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ta, "topology", lambda: ta.Topology.of(ta.list_devices()[-1:], ()))
    assert json.loads(cli("info", "--json").out)["links"] == []
    assert "reaches" not in cli("info").out


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("name", [*NAMES, "".join(NAMES).replace(" ", "")])
def test_the_name_of_a_processor_fits_the_terminal(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, name: str, width: int
) -> None:
    monkeypatch.setattr(_info, "describe", lambda: (_cpu(name),))
    monkeypatch.setenv("COLUMNS", str(width))
    done = cli("info")
    assert (done.code, done.err) == (0, "")
    assert max(map(len, done.out.splitlines())) <= width
    # A long name continues in the rows below, without an omission.
    head, *rows = done.out.split("\n\n")[1].splitlines()
    begin, end = head.index("product"), head.index("units")
    assert "".join(row[begin:end] for row in rows).replace(" ", "") == name.replace(" ", "")
    assert rows[0][end:].split()[:3] == ["8", "16.0", "GiB"]


def _cpu(name: str) -> BackendReport:
    info = ta.DeviceInfo(
        backend="cpu",
        index=0,
        description=name,
        total_memory=16 << 30,
        compute_units=8,
        isolations=("inline", "process"),
    )
    return BackendReport(name="cpu", devices=(DeviceReport(info=info, libraries=("blas",)),))
