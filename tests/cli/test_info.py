from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from typing import TYPE_CHECKING

import pytest

import trio_accel as ta

if TYPE_CHECKING:
    from conftest import Cli


@pytest.fixture
def report(cli: Cli) -> dict[str, object]:
    done = cli("info", "--json")
    assert (done.code, done.err) == (0, "")
    document: dict[str, object] = json.loads(done.out)
    return document


def test_the_document(report: dict[str, object]) -> None:
    assert list(report) == ["command", "version", "devices", "accelerator", "versions", "blas"]
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
        ]
        assert (device["total_memory"], device["compute_units"]) == (info.total_memory, info.compute_units)
        assert {"blas", "fft", "sparse"} <= set(device["libraries"])


def test_versions_are_those_that_are_installed(report: dict[str, object]) -> None:
    versions = report["versions"]
    assert isinstance(versions, dict)
    assert versions["python"] == platform.python_version()
    for name in ("trio", "numpy", "scipy"):
        assert versions[name] == metadata.version(name)
    assert {"cuda-core", "cuda-bindings", "nvmath-python"} <= set(versions)


def test_numpys_blas_is_named(report: dict[str, object]) -> None:
    import numpy as np

    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    assert report["blas"] == f"{blas['name']} {blas['version']}"


def test_it_says_why_there_is_no_accelerator(cli: Cli, report: dict[str, object]) -> None:
    reason = report["accelerator"]
    if any(info.backend != "cpu" for info in ta.list_devices()):
        assert reason is None
    else:
        assert isinstance(reason, str)
        assert "cuda" in reason
        assert f"no accelerator: {reason}\n" in cli("info").out


def test_the_text_has_the_same_facts(cli: Cli, report: dict[str, object]) -> None:
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


@pytest.mark.skipif(
    any(info.backend != "cpu" for info in ta.list_devices()), reason="there is an accelerator"
)
def test_without_a_driver_no_cuda_package_is_imported(cli: Cli) -> None:
    before = {name for name in sys.modules if name.partition(".")[0] in ("cuda", "nvmath")}
    assert cli("info").code == 0
    after = {name for name in sys.modules if name.partition(".")[0] in ("cuda", "nvmath")}
    assert after == before
