"""Every options class refuses a wrong value where it is given, by the name of the argument."""

from __future__ import annotations

import importlib
import math
import pkgutil
import re
from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest

import trio_accel as ta
from trio_accel import actors, cluster, devices, http, jit, patterns, replay, train


async def model(item: int) -> int:
    return item


async def opened() -> Any:
    raise NotImplementedError


BUDGET = patterns.RetryBudget()
# The arguments without which an instance cannot be made.
NEEDED: dict[type, dict[str, Any]] = {
    actors.Backoff: {}, actors.Intensity: {}, actors.MailboxOptions: {}, actors.Policy: {},
    actors.SystemOptions: {}, cluster.ClusterOptions: {}, jit.CompileOptions: {},
    devices.AdaptiveCompletion: {}, devices.DeviceOptions: {}, devices.PerActorStreams: {},
    http.Limits: {}, devices.PolledCompletion: {}, devices.Preload: {"module": "torch"},
    devices.StreamPool: {"size": 2},
    patterns.ByKey: {"key": str}, patterns.ByLoad: {}, patterns.Deployment: {"opening": opened},
    patterns.Generate: {"prompt": (1,)}, patterns.Hedge: {"after": 1.0},
    patterns.PipelineStage: {"model": model}, patterns.Replica: {"model": model},
    patterns.RetryPolicy: {"budget": BUDGET}, patterns.Stage: {"name": "small", "model": model},
    patterns.Swap: {"opening": opened, "version": "2"}, train.Checkpoint: {"folder": "runs"},
    train.Config: {"optimizer": train.sgd()},
    train.Optimizer: {"kind": "sgd", "rate": train.constant(0.1), "numbers": {}},
    train.ParameterGroup: {"matches": callable}, train.Lora: {"targets": ["up"]},
    train.Parallel: {}, train.Precision: {}, replay.Tolerance: {},
}  # fmt: skip
FIELDS = [(cls, field) for cls in NEEDED for field in attrs.fields(cls) if field.init]
IDS = [f"{cls.__name__}.{field.alias}" for cls, field in FIELDS]


def wrong_values(field: attrs.Attribute[Any]) -> Iterator[Any]:
    """Yield values that no field of an annotation takes, whatever else its validator requires."""
    yield from (object(), [object()], {"x": object()}, math.nan, -(10**400), np.array([object()] * 2))
    words = set(re.findall(r"\w+", str(field.type)))
    if field.alias not in ("prompt", "stop"):
        # Bytes are tokens of a model that reads letters.
        yield b"bytes"
    if not words & {"str", "Literal", "Isolation", "Order", "StrPath", "PathLike", "_Paths"}:
        yield "text"
    if "bool" not in words:
        yield from (True, np.True_)
    if words <= {"int", "None"}:
        yield from (-1, 1.5, np.float32(1.5))
    if "float" in words:
        yield from (np.nan, np.float32("nan"), [1.0])
    if "None" not in words and "Any" not in words:
        yield None


@pytest.mark.parametrize(("cls", "field"), FIELDS, ids=IDS)
def test_a_wrong_value_is_refused_by_its_name(cls: type, field: attrs.Attribute[Any]) -> None:
    for value in wrong_values(field):
        with pytest.raises((TypeError, ValueError), match=field.alias):
            cls(**{**NEEDED[cls], field.alias: value})


def test_each_options_class_is_here() -> None:
    """A class that `named_options` has changed, or that looks like one, cannot be left out."""
    names = [one.name for one in pkgutil.walk_packages(ta.__path__, "trio_accel.")]
    found = {
        one
        for name in names
        if not re.search(r"\._|stand_in|cuda", name)
        for one in vars(importlib.import_module(name)).values()
        # Operations may also have changed constructors, but do not have options.
        if isinstance(one, type) and attrs.has(one) and not issubclass(one, devices.Operation)
    }
    checked = {one for one in found if hasattr(one.__init__, "__wrapped__")}
    assert checked == NEEDED.keys()
    named = {one for one in found if re.search(r"(Options|Policy|Config)$", one.__name__)}
    assert {one.__name__ for one in named - checked} == {"AgentConfig"}, "only the package itself makes it"


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ta.DeviceOptions(isolation=3), "DeviceOptions: isolation must be 'process', 'inline' or N"),  # type: ignore[arg-type]
        (lambda: train.Config(optimizer="adam"), r"Config: optimizer must be an optimizer, such as train.ad"),  # type: ignore[arg-type]
        (lambda: train.Config(train.sgd()), "takes 1 positional argument"),  # type: ignore[call-arg]
        (lambda: train.Config(optimizer=train.sgd(), precision="float64"), "precision must be a Precision"),  # type: ignore[arg-type]
        (lambda: train.Config(optimizer=train.sgd(), checkpoint="runs"), "must be a Checkpoint or None, got"),  # type: ignore[arg-type]
        (lambda: train.Parallel(shard_optimizer=1), "shard_optimizer must be True or False, got 1"),  # type: ignore[arg-type]
        (lambda: cluster.ClusterOptions(devices="cpu"), "devices must be a tuple of strings or None"),  # type: ignore[arg-type]
        (lambda: cluster.ClusterOptions(device="cpu"), "device must be a DeviceOptions, got 'cpu'"),  # type: ignore[arg-type]
        (lambda: train.adamw(betas=0.9), "adamw: betas must be two numbers, got 0.9"),  # type: ignore[arg-type]
    ],
)
def test_words_of_a_refusal(make: Any, says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        make()


BAD = (object(), "text", math.nan, -1, [1], b"bytes")


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda **given: patterns.Batcher(model, **given), "adaptive"),
        (lambda **given: patterns.Batcher(model, **given), "bucket"),
        (lambda **given: patterns.Batcher(model, **given), "divides"),
        (lambda **given: patterns.ContinuousBatcher(model, **given), "length"),
        (lambda **given: patterns.ContinuousBatcher(model, **given), "leave"),
        (lambda **given: patterns.ContinuousBatcher(model, **given), "weights"),
        (patterns.CircuitBreaker, "counts"),
        (lambda **given: patterns.FairScheduler(model, **given), "weights"),
        (lambda **given: patterns.FairScheduler(model, **given), "tenant_of"),
        (lambda **given: patterns.MoeRouter(model, [model], **given), "normalise"),
        (lambda **given: patterns.SpeculativeStep(model, model, **given), "draft_may_fail"),
        (lambda **given: patterns.PromptLookup(9, **given), "logits"),
    ],
)
def test_options_of_patterns(make: Any, name: str) -> None:
    for value in BAD:
        with pytest.raises(TypeError, match=f"{name} must be"):
            make(**{name: value})


def test_numbers_of_numpy_become_numbers_of_python() -> None:
    options = ta.DeviceOptions(
        in_flight=np.int64(3),  # type: ignore[arg-type]
        close_grace=np.float32(0.5),  # type: ignore[arg-type]
        nvtx=np.True_,  # type: ignore[arg-type]
    )
    assert [type(one) for one in (options.in_flight, options.close_grace, options.nvtx)] == [int, float, bool]
    assert (options.in_flight, options.close_grace, options.nvtx) == (3, 0.5, True)
    assert train.adamw(np.float32(0.5)).rate_of(1) == 0.5  # type: ignore[arg-type]
    assert patterns.PipelineStage(model, workers=np.int32(2)).workers == 2  # type: ignore[arg-type]
    assert attrs.evolve(options, in_flight=np.uint8(7)).in_flight == 7  # type: ignore[arg-type]
