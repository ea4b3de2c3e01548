"""How GPUs reach one another: from the stand-in driver, and from a made NVML, both in a child process."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
from surroundings import Machine, compile_library

import trio_accel as ta

pytestmark = pytest.mark.no_device

# What is called of `pynvml`; the GPUs in it are those of the file beside it.
NVML = """
import json
from pathlib import Path
from types import SimpleNamespace

NVML_NVLINK_MAX_LINKS = 6
GPUS = json.loads(Path(__file__).with_name("gpus.json").read_text())

class NVMLError(Exception):
    pass

def nvmlInit():
    if not GPUS:
        raise NVMLError("no driver")

def nvmlDeviceGetHandleByUUID(uuid):
    for number, gpu in enumerate(GPUS):
        if gpu["uuid"] == uuid:
            return number
    raise NVMLError(uuid)

def nvmlDeviceGetPciInfo(gpu):
    return SimpleNamespace(domain=0, bus=GPUS[gpu]["bus"], device=0)

def nvmlDeviceGetNvLinkState(gpu, link):
    if link >= len(GPUS[gpu]["ends"]):
        raise NVMLError("no such link")
    return int(GPUS[gpu]["ends"][link] is not None)

def nvmlDeviceGetNvLinkRemoteDeviceType(gpu, link):
    return 2 if GPUS[gpu]["ends"][link] == "switch" else 0

def nvmlDeviceGetNvLinkRemotePciInfo(gpu, link):
    end = GPUS[gpu]["ends"][link]
    return SimpleNamespace(domain=0, bus=200 if end == "switch" else end, device=0)

def nvmlDeviceGetP2PStatus(first, second, index):
    assert index == 2
    is_over = second in GPUS[first]["over_nvlink"] and first in GPUS[second]["over_nvlink"]
    return 0 if is_over else 5

def nvmlDeviceGetTopologyCommonAncestor(first, second):
    return 10 if GPUS[first]["node"] == GPUS[second]["node"] else 50

def nvmlDeviceGetCurrPcieLinkWidth(gpu):
    return GPUS[gpu]["lanes"]
"""


@pytest.fixture
def gpus(equipped: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Four GPUs: two pairs over links of rank 0, joined by links of rank 1."""
    monkeypatch.setenv("STAND_IN_DEVICES", "4")
    monkeypatch.setenv("STAND_IN_PEERS", "-01-/0---/1--0/--0-")
    # In place of one that is installed.
    install([], tmp_path, monkeypatch)
    return equipped


def install(machine: list[dict[str, object]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have a `pynvml` found that tells of GPUs; of none, it fails."""
    (folder / "pynvml.py").write_text(NVML, encoding="utf-8")
    (folder / "gpus.json").write_text(json.dumps(machine), encoding="utf-8")
    monkeypatch.syspath_prepend(str(folder))


def told(number: int, **changes: object) -> dict[str, object]:
    """A GPU for NVML, as the stand-in counts."""
    uuid = f"GPU-57a4d14e-0000-4000-8000-{number:012x}"
    usual: dict[str, object] = {
        "uuid": uuid,
        "bus": 16 + number,
        "ends": [],
        "over_nvlink": [],
        "node": number // 2,
        "lanes": 16,
    }
    return {**usual, **changes}


def rows(topology: ta.Topology) -> list[str]:
    return [" ".join(line.split()) for line in str(topology).splitlines()[1:]]


def test_the_driver_alone(gpus: Machine) -> None:
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
    assert [link.has_native_atomics for link in (fast, slow, none)] == [True, False, False]
    assert {link.width for link in topology.links} == {None}


def test_devices_are_those_that_are_visible(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,0,2")
    assert rows(ta.topology()) == [
        "cuda:0 - host NVLink PCIe",
        "cuda:1 host - PCIe PCIe",
        "cuda:2 NVLink PCIe - PCIe",
        "cpu:0 PCIe PCIe PCIe -",
    ]


def test_access_counts_where_both_have_it(gpus: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STAND_IN_PEERS", "-0-/--0/-0-")
    topology = ta.topology()
    assert topology.link("cuda:0", "cuda:1").kind == "host"
    assert topology.link("cuda:1", "cuda:2").kind == "nvlink"


def test_nvml_tells_of_links_and_lanes(
    gpus: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = [
        # Two links to the next GPU, one that is down, and one to a GPU that the program does not see.
        told(0, ends=[17, None, 17, 99], over_nvlink=[1]),
        told(1, ends=[16, 16], over_nvlink=[0], lanes=8),
        # All links to switches: the lesser number counts.
        told(2, ends=["switch"] * 6, over_nvlink=[3]),
        told(3, ends=["switch"] * 4, over_nvlink=[2], lanes=4),
    ]
    install(machine, tmp_path, monkeypatch)
    topology = ta.topology()
    assert rows(topology) == [
        "cuda:0 - NVLink x2 PCIe x16 host PCIe x16",
        "cuda:1 NVLink x2 - host host PCIe x8",
        "cuda:2 PCIe x16 host - NVLink x4 PCIe x16",
        "cuda:3 host host NVLink x4 - PCIe x4",
        "cpu:0 PCIe x16 PCIe x8 PCIe x16 PCIe x4 -",
    ]
    assert topology.link("cuda:0", "cuda:1").meets_at == "single"
    assert topology.link("cuda:0", "cuda:2").meets_at == "system"
    assert topology.link("cuda:0", "cpu:0").meets_at is None


def test_nvml_decides_what_is_nvlink(gpus: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Atomics tell of NVLink only where NVML does not."""
    install([told(0), told(1), told(2, over_nvlink=[0]), told(3)], tmp_path, monkeypatch)
    topology = ta.topology()
    assert topology.link("cuda:0", "cuda:1").kind == "pcie"
    assert topology.link("cuda:0", "cuda:1").has_native_atomics
    # A GPU that NVML does not know: the driver's word.
    install([told(0), told(1)], tmp_path, monkeypatch)
    topology = ta.topology()
    assert topology.link("cuda:0", "cuda:1").kind == "pcie"
    assert topology.link("cuda:2", "cuda:3").kind == "nvlink"
    assert topology.link("cuda:2", "cuda:3").meets_at is None
    assert topology.link("cuda:0", "cuda:2").width is None


def test_a_driver_that_hangs(
    gpus: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The devices were found before; nothing is told of the ways."""
    assert len(ta.list_devices()) == 5
    (gpus.folder / "libcuda.so.1").unlink()
    compile_library(gpus.folder / "libcuda.so.1", "#include <unistd.h>\nint cuInit() { return pause(); }")
    monkeypatch.setattr("trio_accel.backends.cuda._probe._PATIENCE", 0.3)
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
