"""The links between GPUs, as reported by the stand-in driver in a child process."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from surroundings import Machine, compile_library

import trio_accel as ta

pytestmark = pytest.mark.no_device


@pytest.fixture
def gpus(equipped: Machine, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Four GPUs: two pairs over links of rank 0, joined by links of rank 1."""
    monkeypatch.setenv("STAND_IN_DEVICES", "4")
    monkeypatch.setenv("STAND_IN_PEERS", "-01-/0---/1--0/--0-")
    return equipped


def rows(topology: ta.Topology) -> list[str]:
    return [" ".join(line.split()) for line in str(topology).splitlines()[1:]]


def test_the_ways_between_devices(gpus: Machine) -> None:
    topology = ta.topology()
    assert [info.name for info in topology.devices] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3", "cpu:0"]
    assert rows(topology) == [
        "cuda:0 - NVLink PCIe host PCIe",
        "cuda:1 NVLink - host host PCIe",
        "cuda:2 PCIe host - NVLink PCIe",
        "cuda:3 host host NVLink - PCIe",
        "cpu:0 PCIe PCIe PCIe PCIe -",
    ]
    assert topology.islands() == (("cuda:0", "cuda:1"), ("cuda:2", "cuda:3"), ("cpu:0",))
    fast, slow, none = (topology.link("cuda:0", f"cuda:{number}") for number in (1, 2, 3))
    assert [link.has_peer_access for link in (fast, slow, none)] == [True, True, False]
    assert [link.rank for link in (fast, slow, none)] == [0, 1, None]


def test_only_visible_devices_are_linked(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0,2")
    assert rows(ta.topology()) == [
        "cuda:0 - host NVLink PCIe",
        "cuda:1 host - PCIe PCIe",
        "cuda:2 NVLink PCIe - PCIe",
        "cpu:0 PCIe PCIe PCIe -",
    ]


def test_access_counts_if_both_have_it(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_PEERS", "-0-/--0/-0-")
    topology = ta.topology()
    assert topology.link("cuda:0", "cuda:1").kind == "host"
    assert topology.link("cuda:1", "cuda:2").kind == "nvlink"


def test_a_driver_that_hangs(
    gpus: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The devices were found before; the links are not reported."""
    assert len(ta.list_devices()) == 5
    (gpus.folder / "libcuda.so.1").unlink()
    compile_library(gpus.folder / "libcuda.so.1", "#include <unistd.h>\nint cuInit() { return pause(); }")
    monkeypatch.setattr("trio_accel.backends.cuda._probe._PROBE_TIMEOUT", 0.3)
    with caplog.at_level(logging.WARNING, "trio_accel.backends"):
        topology = ta.topology()
    assert {link.kind for link in topology.links} == {"host"}
    assert "did not answer within 0.3 s" in caplog.text


def test_a_driver_that_does_not_start(
    gpus: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert len(ta.list_devices()) == 5
    monkeypatch.setenv("STAND_IN_INIT_ERROR", "802")
    with caplog.at_level(logging.WARNING, "trio_accel.backends"):
        assert {link.kind for link in ta.topology().links} == {"host"}
    assert "cuInit failed with error 802" in caplog.text


def test_without_a_driver_there_is_the_processor(driverless: Machine) -> None:
    check_there_is_the_processor()


def test_with_a_driver_that_cannot_be_loaded_there_is_the_processor(machine: Machine) -> None:
    (machine.folder / "libcuda.so.1").write_bytes(b"no library")
    check_there_is_the_processor()


def check_there_is_the_processor() -> None:
    topology = ta.topology()
    assert (str(topology).split(), topology.links) == (["cpu:0", "cpu:0", "-"], ())
    assert topology.islands() == (("cpu:0",),)


def test_the_application_does_not_load_the_driver(gpus: Machine) -> None:
    before = Path("/proc/self/maps").read_text(encoding="utf-8").count("libcuda.so")
    ta.topology()
    assert Path("/proc/self/maps").read_text(encoding="utf-8").count("libcuda.so") == before
