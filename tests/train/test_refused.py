"""Bad input of a training: the refusals, and that nothing was committed by it."""

from __future__ import annotations

import inspect
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from test_trainer import config, raises_inside
from train_models import CallMlp, NumpyMlp, batches

import trio_accel as ta
from trio_accel import train

pytestmark = pytest.mark.filterwarnings("ignore:.*was never awaited:RuntimeWarning")

INLINE = ta.DeviceOptions(isolation="inline")


@pytest.fixture
def open_(system: ta.System) -> Callable[..., Any]:
    """Open a trainer of own operations in this process, which is fast."""

    @asynccontextmanager
    async def opened(
        ranks: int = 2, module: Any = CallMlp, chosen: train.Config | None = None
    ) -> AsyncGenerator[train.Trainer, None]:
        given = config() if chosen is None else chosen
        async with (
            system.open_devices(["cpu"] * ranks, options=INLINE) as devices,
            train.open_trainer(devices, module, given) as trainer,
        ):
            yield trainer

    return opened


class Network(train.Module):
    """A model that a program tries to make by hand."""


class OwnArguments(train.Module):
    """A model with arguments as `torch.nn.Module` has them."""

    def __init__(self, width: int, depth: int = 2) -> None:
        raise AssertionError("this is never called")


@pytest.mark.parametrize("cls", [Network, OwnArguments])
def test_an_instance_of_a_model_is_refused_with_the_call_to_write(cls: Any) -> None:
    begin = rf"{cls.__name__}: a trainer makes the model on each device: write train\.open_trainer\(devices, "
    for args, options, rest in (
        ((), {}, r"config, \.\.\.\)$"),
        ((64,), {}, r"config, \.\.\.\)$"),
        ((1, 2, 3, 4), {}, r"config, \.\.\.\)$"),
        ((), {"width": 64, "depth": 3}, r"config, width=64, depth=3\)$"),
    ):
        with pytest.raises(TypeError, match=f"^{begin}{cls.__name__}, {rest}"):
            cls(*args, **options)


def test_the_arguments_of_a_model_have_names_for_programs() -> None:
    assert [*inspect.signature(Network).parameters] == ["a", "b", "plan", "options"]


X, Y = np.zeros((8, 64)), np.zeros(8, np.int64)


class Tensor:
    """A tensor of another library, on the host or elsewhere."""

    def __init__(self, kind: str) -> None:
        self.device = SimpleNamespace(type=kind)

    def numpy(self) -> Any:
        raise AssertionError("a batch is not converted on its own")


NO_ARRAYS: dict[str, tuple[Any, str]] = {
    "a tensor": (Tensor("cpu"), r"test_refused\.Tensor for 'y'; write batch\['y'\]\.numpy\(\)$"),
    "a tensor elsewhere": (Tensor("cuda"), r"write batch\['y'\]\.cpu\(\)\.numpy\(\)$"),
    "a number": (3, r"int for 'y'; write np\.asarray\(batch\['y'\]\)$"),
    "a string": ("labels", r"str for 'y'$"),
    "nothing": (None, r"NoneType for 'y'$"),
    "an object": (
        SimpleNamespace(dtype=np.dtype("int64"), shape=(8,)),
        r"types\.SimpleNamespace for 'y'$",
    ),
}


@pytest.mark.parametrize("module", [CallMlp, NumpyMlp])
async def test_a_value_other_than_an_array_in_a_batch_is_refused(
    open_: Callable[..., Any], module: Any
) -> None:
    async with open_(ranks=1, module=module) as trainer:
        on_device = await trainer.devices[0].put(Y)
        values = {**NO_ARRAYS, "on a device": (on_device, r"write await batch\['y'\]\.to_host\(\)$")}
        for value, says in values.values():
            for use in (
                lambda batch: anext(trainer.steps([batch])),
                lambda batch: trainer.validate([batch]),
            ):
                with pytest.raises(TypeError, match=f"^a batch must have NumPy arrays by name, got .*{says}"):
                    await use({"x": X, "y": value})
        assert (trainer.progress.step, trainer.progress.batches) == (0, 0)


async def test_a_tensor_in_a_batch(open_: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    async with open_(ranks=1, module=NumpyMlp) as trainer:
        with pytest.raises(TypeError, match=r"got torch\.Tensor for 'x'; write batch\['x'\]\.numpy\(\)$"):
            await anext(trainer.steps([{"x": torch.zeros(8, 64), "y": Y}]))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda system, device: device, r"devices must be a list of devices, got \w+; write \[device\]$"),
        (
            lambda system, device: system,
            r"devices must be a list of devices, got System; write system\.devices$",
        ),
        (lambda system, device: system.open_device("cpu"), r"devices must be a list of devices, got .*; "),
        (lambda system, device: None, "devices must be a list of devices, got NoneType$"),
    ],
)
async def test_one_device_in_place_of_a_list(
    system: ta.System, device: ta.Device, make: Callable[..., Any], says: str
) -> None:
    given = make(system, device)
    with pytest.raises(TypeError, match=says):
        async with train.open_trainer(given, CallMlp, config()):
            pass


async def test_a_model_in_place_of_its_class(device: ta.Device) -> None:
    model: Any = CallMlp()
    with pytest.raises(TypeError, match=r"pass the class: open_trainer\(devices, CallMlp, config, \.\.\.\)"):
        async with train.open_trainer([device], model, config()):
            pass


@pytest.mark.parametrize(
    ("batch", "kind", "says"),
    [
        ({"x": X[:1], "y": Y[:1]}, ValueError, "a batch of 1 samples cannot be shared among 2"),
        ({"x": X, "y": Y[:7]}, ValueError, "agree on the number of rows"),
        ({"x": X, "y": np.int64(3)}, ValueError, "agree on the number of rows"),
        ({}, TypeError, "a dict of arrays by name, got dict"),
        ([X, Y], TypeError, "a dict of arrays by name, got list"),
        ({"x": X}, KeyError, "y"),
        ({"x": X[:, :3], "y": Y}, ValueError, "shape"),
    ],
)
async def test_batches(open_: Callable[..., Any], batch: Any, kind: type[Exception], says: str) -> None:
    async with open_() as trainer:
        before = await trainer.parameters()
        with pytest.raises(kind, match=says):
            await anext(trainer.steps([batch]))
        assert (trainer.progress.step, trainer.progress.batches) == (0, 0)
        # Good ones are taken all the same.
        step = await anext(trainer.steps(batches(8)))
        assert step.number == 1
        assert not np.array_equal((await trainer.parameters())["w1"], before["w1"])


async def test_fewer_samples_than_parts(open_: Callable[..., Any]) -> None:
    async with open_(chosen=config(accumulate=5)) as trainer:
        with pytest.raises(ValueError, match="a batch of 8 samples cannot be shared among 10"):
            await anext(trainer.steps([{"x": X, "y": Y}]))


async def test_a_loader_that_fails_or_ends(open_: Callable[..., Any]) -> None:
    def failing() -> Iterator[train.Batch]:
        yield from (batch for _, batch in zip(range(2), batches(8), strict=False))
        raise LookupError("no more disk")

    async def ending() -> AsyncIterator[train.Batch]:
        for _, batch in zip(range(3), batches(8), strict=False):
            yield batch

    async with open_() as trainer:
        with pytest.raises(LookupError, match="no more disk"):
            async for _ in trainer.steps(failing(), until=9):
                pass
        assert trainer.progress.step == 2
        # Used batches are left out, so that a loader that begins again continues.
        assert [step.number async for step in trainer.steps(ending(), until=9)] == [3]
        assert [step.number async for step in trainer.steps(lambda first: batches(8), until=4)] == [4]


class Failing(CallMlp):
    """An infinite, NaN or failing loss, for batches that ask for it."""

    def loss(self, parameters: Any, batch: Any) -> Any:
        return super().loss(parameters, {"x": batch["x"], "y": batch["y"]}) * ta.arrays.mean(batch["factor"])


def factors(*given: float) -> list[train.Batch]:
    return [{**batch, "factor": np.full(8, one)} for one, batch in zip(given, batches(8), strict=False)]


@pytest.mark.parametrize("bad", [math.nan, math.inf])
async def test_infinite_and_nan_losses(
    open_: Callable[..., Any], bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    async with open_(module=Failing) as trainer:
        steps = trainer.steps(factors(1.0, bad, 1.0))
        assert (await anext(steps)).number == 1
        before = await trainer.parameters()
        with pytest.raises(
            train.NotFiniteError, match=f"step 2: the loss is {bad}, .*; the state is that of"
        ):
            await anext(steps)
        np.testing.assert_equal(await trainer.parameters(), before)
    async with open_(module=Failing, chosen=config(on_nan="skip")) as trainer:
        found = [step async for step in trainer.steps(factors(1.0, bad, 1.0))]
        assert [(step.number, step.is_skipped) for step in found] == [(1, False), (1, True), (2, False)]
        assert trainer.progress.batches == 3
    async with open_(module=Failing, chosen=config(on_nan="stop")) as trainer:
        assert [step.number async for step in trainer.steps(factors(1.0, bad, 1.0))] == [1]
    [told] = [one for one in caplog.records if "the training ends" in one.message]
    assert getattr(told, "is_untold", False)


class Stumbling(CallMlp):
    """A loss that raises on one rank, at the request of its samples."""

    def loss(self, parameters: Any, batch: Any) -> Any:
        if batch["x"].shape[0] == 3:
            raise ArithmeticError("three samples are too few")
        return super().loss(parameters, batch)


async def test_a_loss_that_raises_on_one_rank(open_: Callable[..., Any]) -> None:
    async with open_(module=Stumbling) as trainer:
        before = await trainer.parameters()
        with pytest.raises(ArithmeticError, match="three samples are too few"):
            await anext(trainer.steps(batches(7)))
        np.testing.assert_equal(await trainer.parameters(), before)
        assert (await anext(trainer.steps(batches(8)))).number == 1


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: train.adamw(-1.0), "adamw: lr must be a number from 0"),
        (lambda: train.adamw(math.nan), "adamw: lr must be a number from 0"),
        (lambda: train.adamw(betas=(0.9, 1.0)), "adamw: betas must be a number from 0 to below 1, got 1.0"),
        (lambda: train.sgd(momentum=-0.1), "sgd: momentum"),
        (
            lambda: train.warmup_cosine(1e-3, 10, 10),
            "it needs 0 <= warmup < total, got 10 and 10",
        ),
        (lambda: train.warmup_cosine(1e-3, -1, 10), "warmup must be a number from 0"),
        (lambda: config(clip_norm=0.0), "clip_norm must be a number above 0, got 0.0"),
        (lambda: config(timeout=math.nan), "timeout must be a number from 0"),
        (lambda: train.Precision(scale=-1.0), "scale must be a number from 5.96046e-08 to"),
        (lambda: train.Parallel(pipeline=0), "pipeline must be an integer of at least 1, got 0"),
        (lambda: train.Parallel(schedule="zero"), "schedule must be one of '1f1b', 'gpipe', got 'zero'"),  # type: ignore[arg-type]
        (lambda: train.Precision(compute="int8"), "compute must be one of 'float16'"),
        (lambda: train.Precision(master="float16"), "master must be one of 'bfloat16', 'float32'"),
        (lambda: config(accumulate=True), "accumulate must be an integer"),
        (lambda: config(on_nan="ignore"), "on_nan must be one of 'raise', 'skip', 'stop', got 'ignore'"),
        (lambda: train.Checkpoint("x", keep=0), "keep must be an integer of at least 1, got 0"),
        (lambda: train.Checkpoint("x", every=0), "every must be an integer of at least 1, got 0"),
        (lambda: train.Checkpoint("x", every=-3), "every must be an integer of at least 1, got -3"),
        (lambda: train.constant(-1.0), "constant: rate must be a number from 0"),
        (lambda: train.constant(math.inf), "constant: rate must be a number from 0"),
    ],
)
def test_numbers_of_the_configuration(make: Callable[[], object], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()


@pytest.mark.parametrize("rate", [math.nan, math.inf, -1e-3])
async def test_schedules_that_give_no_rate(open_: Callable[..., Any], rate: float) -> None:
    chosen = config(optimizer=train.adamw(lambda step: 1e-3 if step == 1 else rate))
    async with open_(chosen=chosen) as trainer:
        steps = trainer.steps(batches(8))
        await anext(steps)
        with pytest.raises(ValueError, match=r"the schedule gives .* for step 2; a rate is finite"):
            await anext(steps)
        assert trainer.progress.step == 1


async def test_a_schedule_that_divides_by_zero(open_: Callable[..., Any]) -> None:
    async with open_(chosen=config(optimizer=train.sgd(lambda step: 1 / (step - 1)))) as trainer:
        with pytest.raises(ZeroDivisionError):
            await anext(trainer.steps(batches(8)))


@pytest.mark.parametrize(
    ("module", "parallel", "says"),
    [
        (
            NumpyMlp,
            train.Parallel(pipeline=2, tensor=2),
            "2 ranks are not a multiple of pipeline 2 x tensor 2",
        ),
        (CallMlp, train.Parallel(tensor=2), "a CallModule has the whole model on each rank"),
        (int, train.Parallel(), "module must be a class of train.Module or its like, got <class 'int'>"),
    ],
)
async def test_values_that_devices_cannot_share(
    system: ta.System, module: Any, parallel: train.Parallel, says: str
) -> None:
    async with system.open_devices(["cpu"] * 2, options=INLINE) as devices:
        if module is int:
            with pytest.raises(TypeError, match=says):
                async with train.open_trainer(devices, module, config(parallel=parallel)):
                    pass
            return
        with raises_inside(Exception, says):
            async with train.open_trainer(devices, module, config(parallel=parallel)):
                pass


async def test_an_option_that_the_model_does_not_take(device: ta.Device) -> None:
    says = r"open_trainer: CallMlp: there is no option 'load'; there are width"
    with pytest.raises(TypeError, match=says):
        async with train.open_trainer([device], CallMlp, config(), load=None):
            pass


class Forgetful(NumpyMlp):
    """Rank 1 enters a collective that no other rank asks for."""

    def gradients(self, parameters: Any, batch: Any) -> Any:
        rank = ta.programs.current_rank()
        if rank.number == 1:
            rank.all_reduce(np.zeros(3))
        return super().gradients(parameters, batch)


async def test_ranks_of_a_model_ask_for_different_collectives(tmp_path: Path) -> None:
    options = ta.DeviceOptions(isolation="process")
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=options) as devices,
        train.open_trainer(devices, Forgetful, config(timeout=2.0)) as trainer,
    ):
        # Rank 0 waits in another group.
        says = (
            r"rank 0 came last to number 1, all_reduce.* in group 'data', rank 1 came last to number 1, all"
        )
        with pytest.raises(ta.collectives.RankFailedError, match=says):
            await anext(trainer.steps(batches(64)))
        assert (trainer.progress.step, trainer.workers_lost) == (0, 0)


class Waiting(NumpyMlp):
    """Rank 1 takes its time."""

    def gradients(self, parameters: Any, batch: Any) -> Any:
        import time

        if ta.programs.current_rank().number == 1:
            # clock: the time that this work takes decides nothing
            time.sleep(1.0)
        return super().gradients(parameters, batch)


async def test_a_step_that_takes_too_long_names_the_rank() -> None:
    async with (
        ta.open_system("training") as system,
        system.open_devices(["cpu"] * 2, options=ta.DeviceOptions(isolation="process")) as devices,
        train.open_trainer(devices, Waiting, config(timeout=0.4)) as trainer,
    ):
        with pytest.raises(ta.collectives.RankFailedError, match=r"rank 1 came to none") as caught:
            await anext(trainer.steps(batches(64)))
        assert caught.value.rank == 1
        assert trainer.progress.step == 0
