"""Hooks and loggers: when they are called, and that their errors end a training."""

from __future__ import annotations

import logging
import re
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from test_lost_ranks import disturb
from test_trainer import OPTIONS, config, raises_inside
from train_models import CallMlp, batches, reference

import trio_accel as ta
from trio_accel import train

INLINE = ta.DeviceOptions(isolation="inline")


class Noted(train.Hook):
    """Notes all calls, and raises in one of them."""

    def __init__(self, fails: str | None = None) -> None:
        self.calls: list[Any] = []
        self._fails = fails

    def _note(self, *call: Any) -> None:
        self.calls.append(call)
        if call[0] == self._fails:
            raise LookupError(f"the hook fails in {call[0]}")

    def before_step(self, trainer: Any, batch: Mapping[str, Any]) -> None:
        self._note("before", trainer.progress.step, len(batch["x"]))

    async def after_step(self, trainer: Any, step: Any) -> None:  # type: ignore[override]
        await trio.lowlevel.checkpoint()
        self._note("after", step.number)

    def on_loss(self, trainer: Any, error: Exception) -> None:
        self._note("loss", isinstance(error, Exception))

    async def at_end(self, trainer: Any, error: Exception | None) -> None:  # type: ignore[override]
        self._note("end", error if error is None else type(error))


async def trained(
    chosen: train.Config, until: int, *, options: Any = INLINE, each: Any = None, given: Any = None
) -> list[train.Step]:
    steps: list[train.Step] = []
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=options) as devices,
        train.open_trainer(devices, CallMlp, chosen) as trainer,
    ):
        async for step in trainer.steps(given or batches(64), until=until):
            steps.append(step)
            if each is not None:
                await each(trainer, step)
    return steps


async def test_hooks_are_called_in_order() -> None:
    first, second = Noted(), Noted()
    await trained(config(hooks=[first, second]), 2)
    calls = [("before", 0, 64), ("after", 1), ("before", 1, 64), ("after", 2), ("end", None)]
    assert first.calls == second.calls == calls


async def test_a_hook_hears_of_losses() -> None:
    hook = Noted()
    steps = await trained(config(hooks=[hook]), 10, options=OPTIONS, each=disturb)
    np.testing.assert_allclose([step.loss for step in steps], reference(10, 64)[0], rtol=0, atol=1e-12)
    assert sum(step.replays for step in steps) == hook.calls.count(("loss", True))
    assert [call for call in hook.calls if call[0] == "after"] == [
        ("after", number) for number in range(1, 11)
    ]


@pytest.mark.parametrize(("where", "committed"), [("before", 0), ("after", 1), ("end", 2)])
async def test_a_hook_that_raises_ends_the_training(where: str, committed: int) -> None:
    hook = Noted(where)
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=INLINE) as devices,
        train.open_trainer(devices, CallMlp, config(hooks=[hook])) as trainer,
    ):
        steps = trainer.steps(batches(64), until=2)
        with pytest.raises(LookupError, match=f"the hook fails in {where}"):
            [step async for step in steps]
        with pytest.raises(StopAsyncIteration):
            await anext(steps)
        assert trainer.progress.step == committed
    assert hook.calls[-1] == ("end", None if where == "end" else LookupError)


async def test_a_hook_that_raises_on_a_loss() -> None:
    async def kill(trainer: train.Trainer, step: train.Step) -> None:
        ta.testing.poison(trainer.devices[0])

    hook = Noted("loss")
    options = ta.DeviceOptions(isolation="process", intensity=ta.Intensity(99, 1.0))
    with raises_inside(LookupError, "the hook fails in loss"):
        await trained(config(hooks=[hook]), 5, options=options, each=kill)


async def test_the_end_is_reported_with_the_error() -> None:
    hook = Noted()
    short = {name: one[:1] for name, one in next(batches(64)).items()}
    with raises_inside(ValueError, "cannot be shared among 2"):
        await trained(config(hooks=[hook]), 5, given=[short])
    assert hook.calls[-1] == ("end", ValueError)


class Blocking(train.Hook):
    """It holds the loop."""

    def after_step(self, trainer: Any, step: Any) -> None:
        # clock: the time that this work takes decides nothing
        time.sleep(0.4)


async def test_a_hook_that_blocks_the_loop_is_named(caplog: pytest.LogCaptureFixture) -> None:
    options = ta.SystemOptions(held_after=0.1)
    with caplog.at_level(logging.WARNING):
        async with (
            ta.open_system("training", options=options) as system,
            system.open_devices(["cpu"] * 2, options=INLINE) as devices,
            train.open_trainer(devices, CallMlp, config(hooks=[Blocking()])) as trainer,
        ):
            found = [step.loss async for step in trainer.steps(batches(64), until=2)]
            with trio.fail_after(60):
                while "in after_step" not in caplog.text:  # noqa: ASYNC110  # a thread tells it
                    await trio.sleep(0.01)
    assert found == pytest.approx(reference(2, 64)[0], abs=1e-12)
    says = r"the Trio loop was held for \d+\.\d s by test_observers.py:\d+, in after_step: .* to a thread"
    assert re.search(says, caplog.text)


class Rows(train.Logger):
    """Keeps the figures, or raises."""

    def __init__(self, fails: int = 0) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self._fails = fails

    def log(self, step: int, figures: Mapping[str, float]) -> None:
        if step == self._fails:
            raise OSError(28, "No space left on device")
        self.rows.append((step, dict(figures)))


async def test_figures_match_the_steps() -> None:
    log = Rows()
    groups = [train.ParameterGroup(lambda name: name == "b1", lr=0.5)]
    chosen = config(loggers=[log], groups=groups, tokens=lambda batch: 128)
    steps = await trained(chosen, 3)
    assert [number for number, _ in log.rows] == [1, 2, 3]
    for step, (_, figures) in zip(steps, log.rows, strict=True):
        names = ["loss", "gradient_norm", "rate", "tokens_per_second", "seconds", "workers_lost"]
        assert figures == {name: getattr(step, name) for name in names} | {"rate_1": 0.5}


async def test_a_logger_that_raises_ends_the_training() -> None:
    log = Rows(fails=2)
    with raises_inside(OSError, "No space left"):
        await trained(config(loggers=[log]), 3)
    assert [number for number, _ in log.rows] == [1]


def test_rows_of_a_table(tmp_path: Path) -> None:
    path = tmp_path / "log.csv"
    log = train.CsvLogger(path)
    log.log(1, {"loss": 0.5})
    log.log(2, {"loss": 0.25, "validation_loss": 1.0})
    log.log(3, {"loss": 0.125})
    assert path.read_text().split() == ["step,loss,validation_loss", "1,0.5,", "2,0.25,1.0", "3,0.125,"]
    # A killed program may have left the beginning of a row.
    path.write_text(path.read_text() + "4")
    log = train.CsvLogger(path)
    log.log(3, {"loss": 0.1})
    assert path.read_text().split() == ["step,loss,validation_loss", "1,0.5,", "2,0.25,1.0", "3,0.1,"]
    with pytest.raises(FileNotFoundError):
        train.CsvLogger(tmp_path / "none" / "log.csv").log(1, {})


def test_gauges_of_the_recorder() -> None:
    values: dict[str, float] = {}

    class Recorder:
        def gauge(self, name: str, help: str = "", /) -> Any:  # noqa: A002
            class Gauge:
                def set(self, value: float, /) -> None:
                    values[name] = value

            return Gauge()

    train.RecorderLogger(Recorder()).log(7, {"loss": 0.5, "gradient_norm": float("nan")})
    assert values == {"train_step": 7, "train_loss": 0.5}


async def test_figures_in_the_telemetry() -> None:
    chosen = None
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=INLINE) as devices,
    ):
        with ta.telemetry.record(system) as recorder:
            chosen = config(loggers=[train.RecorderLogger(recorder)])
            async with train.open_trainer(devices, CallMlp, chosen) as trainer:
                [step] = [step async for step in trainer.steps(batches(64), until=1)]
            text = ta.telemetry.exposition(recorder)
    [line] = [line for line in text.splitlines() if line.startswith("train_loss{")]
    assert float(line.split()[-1]) == pytest.approx(step.loss)


def scalars(folder: Path) -> list[tuple[int, str, float]]:
    """Read the scalars of event files, which are length, checksum, message and checksum."""
    event = pytest.importorskip("tensorboardX.proto.event_pb2")
    found: list[tuple[int, str, float]] = []
    for path in sorted(folder.iterdir()):
        data = path.read_bytes()
        while data:
            [size] = struct.unpack("<Q", data[:8])
            one = event.Event.FromString(data[12 : 12 + size])
            found += [(one.step, value.tag, value.simple_value) for value in one.summary.value]
            data = data[16 + size :]
    return found


@pytest.fixture
def _no_tracker_is_left() -> Iterator[None]:
    """End the process that Python 3.14 keeps for the queues of `multiprocessing`."""
    yield
    resource_tracker._resource_tracker._stop()


@pytest.mark.usefixtures("_no_tracker_is_left")
def test_scalars_of_tensorboard(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX", reason="the extra tensorboard is not installed")
    log = train.TensorBoardLogger(tmp_path)
    log.log(1, {"loss": 0.5})
    log.log(2, {"loss": 0.25, "rate": 0.125})
    log.close()
    assert scalars(tmp_path) == [(1, "loss", 0.5), (2, "loss", 0.25), (2, "rate", 0.125)]


def test_tensorboard_is_not_installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(ImportError, match="TensorBoardLogger needs tensorboardX: pip install"):
        train.TensorBoardLogger(tmp_path)


def test_pytorch_and_safetensors_are_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("torch", "safetensors", "safetensors.numpy"):
        monkeypatch.setitem(sys.modules, name, None)
    lora = train.Lora(["up"], rank=2)
    arrays = {"up.lora_A.weight": np.zeros((2, 3)), "up.lora_B.weight": np.zeros((3, 2))}
    for ask in (lambda: lora.load("x"), lambda: lora.save("x", arrays)):
        with pytest.raises(ImportError, match="files of adapters need safetensors: pip install safetensors"):
            ask()
    with pytest.raises(ImportError, match="needs PyTorch: import torch at the top of its module"):
        lora.add(None)
    # The optimizer's state is requested from PyTorch in the workers only.
    assert train.torch_optimizer("torch.optim:RAdam", 1e-3).states == ("optimizer",)


async def test_own_operations_need_no_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    chosen = config(average=0.9, groups=[train.ParameterGroup(lambda name: name == "b1", is_frozen=True)])
    assert [step.number for step in await trained(chosen, 2)] == [1, 2]
