"""Readings of GPUs, from a stand-in for NVIDIA's management library."""

from __future__ import annotations

import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace

import attrs
import pytest
import trio
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from telemetry.nvml_machine import Gpu, Machine, NVMLError, NVMLLibraryMismatchError, gpu, install, uuid_of

import trio_accel as ta
from trio_accel.backends.base import DeviceInfo
from trio_accel.backends.cpu import CpuBackend
from trio_accel.telemetry import GpuProcess, GpuReading, XidEvent, prometheus_gpus, read_gpus, watch_gpus

# What a reading has before anything is asked, or is no answer of one function.
NOT_ASKED = {"time", "index", "devices", "xids", "error"}
ATTRIBUTES = {
    "UUID": {"uuid"},
    "Name": {"name"},
    "PciInfo": {"pci_bus_id"},
    "MemoryInfo": {"memory_used", "memory_total"},
    "UtilizationRates": {"utilization", "memory_utilization"},
    "PowerUsage": {"power"},
    "EnforcedPowerLimit": {"power_limit"},
    "Temperature": {"temperature"},
    "TotalEccErrors": {"ecc_corrected", "ecc_uncorrected"},
    "MigMode": {"is_mig"},
    "ComputeRunningProcesses": {"processes"},
}


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine([gpu(0), gpu(1)])
    install(machine, monkeypatch)
    return machine


def unknown(reading: GpuReading) -> set[str]:
    """What of a reading is not known, of all that is asked for."""
    return {name for name, value in attrs.asdict(reading).items() if value is None} - NOT_ASKED


async def until(condition: Callable[[], object]) -> None:
    with trio.fail_after(10):
        while not condition():  # noqa: ASYNC110  # a thread does it
            await trio.sleep(0.005)


async def test_all_that_a_gpu_tells(machine: Machine) -> None:
    processes = [
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=1 << 30),
        SimpleNamespace(pid=1, usedGpuMemory=None),
    ]
    machine.gpus[1] = gpu(1, ComputeRunningProcesses=processes)
    before = time.time()
    readings = await read_gpus()
    assert [reading.index for reading in readings] == [0, 1]
    assert before <= readings[1].time <= time.time()
    assert attrs.evolve(readings[1], time=0.0) == GpuReading(
        time=0.0,
        index=1,
        uuid=uuid_of(1),
        pci_bus_id="00000000:18:00.0",
        name="NVIDIA H200",
        memory_used=3 << 30,
        memory_total=141 << 30,
        utilization=87,
        memory_utilization=41,
        power=412.5,
        power_limit=700.0,
        temperature=61,
        ecc_corrected=5,
        ecc_uncorrected=2,
        is_mig=False,
        processes=(
            GpuProcess(pid=os.getpid(), memory=1 << 30, is_ours=True),
            GpuProcess(pid=1, memory=None, is_ours=False),
        ),
    )
    assert readings[0].processes == ()
    assert (machine.users, machine.most) == (0, 1)


@pytest.mark.parametrize("name", ATTRIBUTES)
@pytest.mark.parametrize(
    "error",
    [
        NVMLError("NVML_ERROR_NOT_SUPPORTED"),
        NVMLError("NVML_ERROR_NO_PERMISSION"),
        NVMLError("NVML_ERROR_UNKNOWN"),
        NVMLLibraryMismatchError(),
        AttributeError(),
    ],
    ids=str,
)
async def test_what_is_not_told_is_none(machine: Machine, name: str, error: Exception) -> None:
    machine.gpus[0] = gpu(0, **{name: error})
    first, second = await read_gpus()
    assert (unknown(first), first.error) == (ATTRIBUTES[name], None)
    assert unknown(second) == set()


async def test_zero_is_not_none(machine: Machine) -> None:
    nothing = SimpleNamespace(gpu=0, memory=0)
    machine.gpus = [gpu(0, UtilizationRates=nothing, PowerUsage=0, TotalEccErrors={0: 0, 1: 0})]
    [reading] = await read_gpus()
    assert (reading.utilization, reading.memory_utilization, reading.power) == (0, 0, 0.0)
    assert (reading.ecc_corrected, reading.ecc_uncorrected) == (0, 0)


async def test_a_lost_gpu_is_asked_no_more(machine: Machine) -> None:
    lost = NVMLError("NVML_ERROR_GPU_IS_LOST")
    asked: list[str] = []
    machine.gpus = [gpu(0, UtilizationRates=lost), lost, gpu(2)]
    machine.wait = asked.append
    half, whole, healthy = await read_gpus()
    assert (half.error, half.memory_used, half.utilization, half.name) == ("Gpu is lost", 3 << 30, None, None)
    assert (whole.index, whole.error, unknown(whole)) == (1, "Gpu is lost", set().union(*ATTRIBUTES.values()))
    assert (healthy.error, unknown(healthy)) == (None, set())
    assert asked.count("nvmlDeviceGetPowerUsage") == 1


async def test_a_divided_gpu(machine: Machine) -> None:
    none = NVMLError("NVML_ERROR_NOT_SUPPORTED")
    refused = NVMLError("NVML_ERROR_NO_PERMISSION")
    machine.gpus = [gpu(0, MigMode=[1, 1], UtilizationRates=none, ComputeRunningProcesses=refused)]
    [reading] = await read_gpus()
    assert (reading.is_mig, reading.memory_total) == (True, 141 << 30)
    assert unknown(reading) == {"utilization", "memory_utilization", "processes"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        ("NVML_ERROR_LIBRARY_NOT_FOUND", "there is no NVIDIA driver here .* not by pip"),
        ("NVML_ERROR_DRIVER_NOT_LOADED", "kernel module of the NVIDIA driver is not loaded"),
        ("NVML_ERROR_LIB_RM_VERSION_MISMATCH", "differ in version.*: reboot"),
        ("NVML_ERROR_UNKNOWN", r"does not answer \(Unknown\); see what `nvidia-smi`"),
    ],
)
async def test_without_a_driver(machine: Machine, error: str, message: str) -> None:
    machine.opening = NVMLError(error)
    with pytest.raises(ta.NotSupportedError, match=message):
        await read_gpus()
    with pytest.raises(ta.NotSupportedError, match=message):
        async with watch_gpus():
            pytest.fail("there is nothing to watch")


async def test_without_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(ta.NotSupportedError, match=re.escape("pip install '.[nvml]'")):
        await read_gpus()


async def test_devices_are_matched_by_uuid(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    # As with CUDA_VISIBLE_DEVICES=1: the program's first device is the machine's second GPU.
    machine.gpus.append(gpu(2, UUID=NVMLError("NVML_ERROR_NOT_SUPPORTED")))
    [info] = CpuBackend().list_devices()
    info = attrs.evolve(info, uuid=uuid_of(1).upper())
    described: list[DeviceInfo] = [info]

    def list_described(_: CpuBackend) -> tuple[DeviceInfo, ...]:
        return tuple(described)

    monkeypatch.setattr(CpuBackend, "list_devices", list_described)
    async with ta.open_system("test") as system:
        assert [reading.devices for reading in await read_gpus(system)] == [(), (), None]
        device = await system.open_device("cpu:0", options=ta.DeviceOptions(isolation="inline"))
        assert [reading.devices for reading in await read_gpus(system)] == [(), (device.path,), None]
        assert [reading.devices for reading in await read_gpus()] == [None, None, None]
    # One that tells no UUID is on no GPU.
    described[0] = attrs.evolve(info, uuid=None)
    async with ta.open_system("test") as system:
        await system.open_device("cpu:0", options=ta.DeviceOptions(isolation="inline"))
        assert [reading.devices for reading in await read_gpus(system)] == [(), (), None]


async def test_workers_are_ours(machine: Machine) -> None:
    async with ta.open_system("test") as system:
        device = await system.open_device("cpu:0", options=ta.DeviceOptions(isolation="process"))
        [pid] = [child.pid for child in system.tree().children[0].children if child.pid is not None]
        processes = [SimpleNamespace(pid=pid, usedGpuMemory=7), SimpleNamespace(pid=1, usedGpuMemory=8)]
        machine.gpus = [gpu(0, ComputeRunningProcesses=processes)]
        [reading] = await read_gpus(system)
        assert reading.processes is not None
        assert [process.is_ours for process in reading.processes] == [True, False]
        [reading] = await read_gpus()
        assert reading.processes is not None
        assert not any(process.is_ours for process in reading.processes)
        assert device.generation == 1


async def test_a_library_that_hangs(machine: Machine) -> None:
    release = threading.Event()
    machine.wait = lambda name: name == "nvmlDeviceGetPowerUsage" and release.wait(30)
    try:
        with trio.move_on_after(0.05) as scope:
            await read_gpus()
        assert scope.cancelled_caught
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(read_gpus)
            await trio.sleep(0.05)
            # The loop went on, and nobody called the library besides.
            assert machine.calls == 1
            release.set()
    finally:
        release.set()
    assert (machine.most, machine.users) == (1, 0)


def test_a_program_can_end_while_the_library_hangs() -> None:
    program = (
        "import sys, threading, types, trio, trio_accel as ta\n"
        "module = sys.modules['pynvml'] = types.ModuleType('pynvml')\n"
        "module.NVMLError = ValueError\n"
        "module.nvmlInit = threading.Event().wait\n"
        "async def main():\n"
        "    with trio.move_on_after(0.1):\n"
        "        async with ta.telemetry.watch_gpus():\n"
        "            raise AssertionError\n"
        "trio.run(main)\n"
        "print('ended')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "ended\n", "")


async def test_watching(machine: Machine) -> None:
    async with watch_gpus(0.1) as watch:
        first = watch.latest
        assert [reading.temperature for reading in first] == [61, 61]
        assert [reading.xids for reading in first] == [(), ()]
        machine.gpus[1] = gpu(1, Temperature=90)
        await until(lambda: watch.latest[1].temperature == 90)
        assert watch.latest[0].time > first[0].time
        assert (watch.failure, watch.interval) == (None, 0.1)
        assert 0 <= watch.age < 10
        assert machine.sets == 2
    assert (machine.users, machine.sets, machine.most) == (0, 0, 1)


async def test_errors_that_the_driver_reports(machine: Machine) -> None:
    other = gpu(1)
    other.reports = False
    machine.gpus[1] = other
    first = machine.gpus[0]
    assert isinstance(first, Gpu)
    before = time.time()
    async with watch_gpus(0.1) as watch:
        first.xids.extend([79, 31])
        await until(lambda: watch.latest[0].xids)
        xids = watch.latest[0].xids
        assert xids is not None
        assert [event.number for event in xids] == [79, 31]
        assert all(before <= event.time <= time.time() for event in xids)
        assert isinstance(xids[0], XidEvent)
        assert watch.latest[1].xids is None
        # The last fifty are kept; and those that come with a loss are not lost.
        first.xids.extend(range(100, 190))
        machine.gpus[0] = NVMLError("NVML_ERROR_GPU_IS_LOST")
        await until(lambda: watch.latest[0].error)
        xids = watch.latest[0].xids
        assert xids is not None
        assert [event.number for event in xids] == list(range(140, 190))
    assert (machine.users, machine.sets) == (0, 0)


async def test_readings_go_on_after_a_failure(machine: Machine) -> None:
    async with watch_gpus(0.1) as watch:
        machine.opening = NVMLError("NVML_ERROR_DRIVER_NOT_LOADED")
        await until(lambda: watch.failure)
        assert watch.failure is not None
        assert "kernel module" in watch.failure
        assert [reading.temperature for reading in watch.latest] == [61, 61]
        machine.opening = None
        await until(lambda: watch.failure is None)
    assert (machine.users, machine.sets) == (0, 0)


async def test_a_library_that_begins_to_hang_is_left(machine: Machine) -> None:
    release = threading.Event()
    try:
        async with watch_gpus(0.1) as watch:
            machine.wait = lambda _: release.wait(30)
            await until(lambda: machine.calls)
            await until(lambda: watch.age > 0.15)
            assert len(watch.latest) == 2
            before = trio.current_time()
        assert trio.current_time() - before < 5
        assert machine.sets == 2
    finally:
        release.set()
    # When it goes on, the thread gives back what it has.
    await until(lambda: (machine.users, machine.sets) == (0, 0))


async def test_the_body_may_raise_and_be_cancelled(machine: Machine) -> None:
    with pytest.raises(KeyError):
        async with watch_gpus():
            raise KeyError
    with trio.CancelScope() as scope:
        async with watch_gpus():
            scope.cancel()
            await trio.sleep_forever()
    assert scope.cancelled_caught
    assert (machine.users, machine.sets) == (0, 0)


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3), ExceptionGroup("", [KeyError()])])
async def test_the_error_of_the_body_is_raised_as_it_is(machine: Machine, error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        async with watch_gpus():
            raise error
    assert raised.value is error
    assert (machine.users, machine.sets) == (0, 0)


async def test_a_cancelled_body_is_told_so(machine: Machine) -> None:
    told: list[str] = []
    with trio.CancelScope() as scope:
        try:
            async with watch_gpus():
                scope.cancel()
                await trio.sleep_forever()
        except trio.Cancelled:
            told.append("cancelled")
            raise
    assert told == ["cancelled"]


@pytest.mark.parametrize("interval", [0, 0.09, 61, math.nan, math.inf, True, "1", None])
async def test_intervals_that_are_none(machine: Machine, interval: float) -> None:
    with pytest.raises(ValueError, match="interval must be"):
        async with watch_gpus(interval):
            pytest.fail("it was refused")
    assert machine.users == 0


async def test_a_machine_without_gpus(machine: Machine) -> None:
    machine.gpus = []
    assert await read_gpus() == ()
    async with watch_gpus() as watch:
        assert watch.latest == ()


async def test_readings_for_prometheus(machine: Machine) -> None:
    lost = NVMLError("NVML_ERROR_GPU_IS_LOST")
    machine.gpus = [gpu(0, Temperature=NVMLError("NVML_ERROR_NOT_SUPPORTED")), lost]
    registry = CollectorRegistry()
    async with watch_gpus(0.1) as watch:
        registry.register(prometheus_gpus(watch))
        families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    found = {
        (sample.name.removeprefix("trio_accel_gpu_"), sample.labels.get("gpu")): sample.value
        for family in families
        for sample in family.samples
    }
    assert 0 <= found.pop(("age_seconds", None)) < 10
    assert found == {
        ("up", uuid_of(0)): 1,
        ("up", "1"): 0,
        ("memory_used_bytes", uuid_of(0)): 3 << 30,
        ("memory_total_bytes", uuid_of(0)): 141 << 30,
        ("utilization_percent", uuid_of(0)): 87,
        ("memory_utilization_percent", uuid_of(0)): 41,
        ("power_watts", uuid_of(0)): 412.5,
        ("power_limit_watts", uuid_of(0)): 700,
        ("ecc_corrected_total", uuid_of(0)): 5,
        ("ecc_uncorrected_total", uuid_of(0)): 2,
    }
