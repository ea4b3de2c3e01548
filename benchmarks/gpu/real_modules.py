"""Models of others as programs: ``python -m benchmarks.gpu.real_modules (recover | rates) [ROUNDS]``.

``recover`` opens BERT of `transformers` and resnet18 of `timm`, without a spare and with one. It loses
contexts by SIGKILL, and by an index out of range, and prints the seconds to the next right answer. Answers
are compared by bit, and weights by their hash. ``rates`` prints the batches a second that eight askers get of
BERT and of the sentence encoder of the examples, beside the plain loop of the same model in this process.

It needs a GPU, PyTorch, `transformers` and, for ``recover``, `timm`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

import attrs
import numpy as np
import numpy.typing as npt
import trio

import trio_accel as ta

__all__ = ["main"]

Host = npt.NDArray[Any]

_ROOT = Path(__file__).parents[2]
# Of each, what it is asked for.
_TEXTS, _TOKENS, _IMAGES = 8, 64, 8
# An index that there is nowhere.
_OUT_OF_RANGE = 10**6
_ASKERS = 8
_CALLS = 200
"""Calls of the plain loop in a turn."""
_SECONDS = 2.0
"""Of the askers in a turn."""
# From one loss to the next: so long that the last one is over, and that a spare is there again.
_PAUSE, _PAUSE_FOR_SPARE = 1.5, 2.5


@attrs.frozen(kw_only=True)
class Case:
    """One model and what it is asked.

    Attributes:
        name: What it is called in the output.
        model: Its class.
        method: Name of the method that is asked.
        weights: Its first argument, by name.
        options: Further arguments of the constructor.
        good: Arguments of the method.
        bad: The same, with an index out of range.
    """

    name: str
    model: type[Any]
    method: str
    weights: Mapping[str, Host]
    options: Mapping[str, Any] = attrs.field(factory=dict[str, Any])
    good: Sequence[Any]
    bad: Sequence[Any] = ()

    @property
    def preload(self) -> tuple[str, ...]:
        """The module to be imported ahead."""
        return (self.model.__module__,)


def bert() -> Case:
    """Make the case of BERT of `transformers`: 109 million parameters, 8 texts of 64 tokens."""
    module: Any = import_module("benchmarks.gpu._bert")
    ids = np.random.default_rng(0).integers(0, 30000, (_TEXTS, _TOKENS))
    bad = ids.copy()
    bad[3, 3] = _OUT_OF_RANGE
    return Case(
        name="bert",
        model=module.Bert,
        method="encode",
        weights=module.random_weights(),
        good=(ids,),
        bad=(bad,),
    )


def resnet() -> Case:
    """Make the case of resnet18 of `timm`: 8 images of 224 × 224."""
    module: Any = import_module("benchmarks.gpu._timm")
    images = np.random.default_rng(0).standard_normal((_IMAGES, 3, 224, 224), np.float32)
    places = np.arange(_IMAGES)
    bad = places.copy()
    bad[2] = _OUT_OF_RANGE
    return Case(
        name="timm",
        model=module.Timm,
        method="classify",
        weights=module.random_weights(),
        good=(images, places),
        bad=(images, bad),
    )


def sentences(texts: int, tokens: int) -> Case:
    """Make the case of the examples' sentence encoder, of MiniLM's shape, with random weights."""
    minilm: Any = import_module("minilm")
    shape = minilm.Shape(
        layers=6, heads=12, width=384, inner=1536, words=30522, places=512, types=2, epsilon=1e-12
    )
    random = np.random.default_rng(0)
    weights: dict[str, Host] = {
        name: random.standard_normal(sizes, np.float32) * np.float32(0.02)
        for name, sizes in minilm.weights_of(shape).items()
    }
    ids = np.random.default_rng(0).integers(0, 30000, (texts, tokens))
    return Case(
        name=f"minilm {texts}x{tokens}",
        model=import_module("minilm_torch").TorchEncoder,
        method="encode",
        weights=weights,
        options={"layers": shape.layers, "heads": shape.heads, "epsilon": shape.epsilon},
        good=(ids, np.ones(ids.shape, np.float32), shape.width),
    )


async def recover(rounds: int) -> None:
    """Print the seconds from a loss to the next right answer.

    Args:
        rounds: Losses of each kind.
    """
    for make in (bert, resnet):
        case = make()
        for spares in (0, 1):
            await _recover(case, spares, rounds)


async def _recover(case: Case, spares: int, rounds: int) -> None:
    options = ta.DeviceOptions(
        isolation="process",
        retry=1,
        retry_suspects=False,
        spares=spares,
        preload=case.preload,
        intensity=ta.Intensity(1000, 60.0),
    )
    began = time.perf_counter()
    async with ta.open_system("real") as system, system.open_device("cuda", options=options) as device:
        weights = {name: await device.put(weight) for name, weight in case.weights.items()}
        hashed = await _hash(weights)
        async with ta.open_program(device, case.model, weights, **case.options) as program:

            async def answer(given: Sequence[Any]) -> Host:
                result: ta.AccelRef = await program.ask(case.method, *given)
                return await result.to_host()

            expected = await answer(case.good)
            _say(f"{case.name}, spares {spares}: open after {time.perf_counter() - began:.1f} s")
            for is_killed in (True, False):
                took, after_error, errors, same = list[float](), list[float](), set[str](), 0
                for _ in range(rounds):
                    await trio.sleep(_PAUSE_FOR_SPARE if spares else _PAUSE)
                    await program.ask(case.method, *case.good)
                    lost = told = time.perf_counter()
                    if is_killed:
                        pid = (await device.statistics()).pid
                        assert pid is not None
                        os.kill(pid, signal.SIGKILL)
                    else:
                        errors.add(await _error_of(answer, case.bad))
                        told = time.perf_counter()
                    same += np.array_equal(await answer(case.good), expected)
                    now = time.perf_counter()
                    took.append(now - lost)
                    after_error.append(now - told)
                kept = "the same" if await _hash(weights) == hashed else "OTHERS"
                how = "SIGKILL" if is_killed else f"bad index ({', '.join(sorted(errors))})"
                behind = "" if is_killed else f", {statistics.median(after_error):.3f} s after the error"
                _say(
                    f"{case.name}, spares {spares}, {how}: median {statistics.median(took):.3f} s, "
                    f"most {max(took):.3f} s{behind}; answers the same by bit: {same} of {rounds}; "
                    f"weights: {kept}"
                )


async def _error_of(answer: Callable[[Sequence[Any]], Any], bad: Sequence[Any]) -> str:
    try:
        await answer(bad)
    except ta.AccelError as error:
        return type(error).__name__
    return "NO ERROR"


async def _hash(arrays: Mapping[str, ta.AccelRef]) -> str:
    found = hashlib.sha256()
    for name in sorted(arrays):
        found.update(np.ascontiguousarray(await arrays[name].to_host()).tobytes())
    return found.hexdigest()


async def rates(rounds: int) -> None:
    """Print the batches a second of eight askers, beside the plain loop.

    Args:
        rounds: Turns of the two.
    """
    for make in (bert, partial(sentences, 8, 64), partial(sentences, 32, 128)):
        await _rates(make(), rounds)


async def _rates(case: Case, rounds: int) -> None:
    options = ta.DeviceOptions(isolation="process", retry=1, preload=case.preload)
    async with ta.open_system("real") as system, system.open_device("cuda", options=options) as device:
        weights = {name: await device.put(weight) for name, weight in case.weights.items()}
        args = list[Any]()
        for value in case.good:
            args.append(await device.put(cast("Host", value)) if isinstance(value, np.ndarray) else value)
        plain = _Plain(case)
        async with ta.open_program(device, case.model, weights, **case.options) as program:
            found = await (await program.ask(case.method, *args)).to_host()
            difference = float(np.abs(found - plain.call().cpu().numpy()).max())
            _say(f"{case.name}: largest difference from the plain model {difference:g}")
            for turn in range(rounds):
                alone = await trio.to_thread.run_sync(plain.rate)
                asked = await _ask(program, case.method, args)
                _say(
                    f"{case.name}, turn {turn}: plain loop {alone:.1f} /s, {_ASKERS} askers {asked:.1f} /s, "
                    f"share {asked / alone:.3f}"
                )


class _Plain:
    """The model of a case in this process, by itself."""

    def __init__(self, case: Case) -> None:
        self._torch: Any = import_module("torch")
        model = case.model({name: self._there(host) for name, host in case.weights.items()}, **case.options)
        self._method = getattr(model, case.method)
        self._given = [self._there(value) for value in case.good]

    def _there(self, value: object) -> object:
        return self._torch.from_numpy(value).cuda() if isinstance(value, np.ndarray) else value

    def call(self) -> Any:
        """Call it once; returns a tensor, which may not be computed yet."""
        return self._method(*self._given)

    def rate(self) -> float:
        """Return the calls a second, back to back."""
        for _ in range(10):
            self.call()
        self._torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(_CALLS):
            self.call()
        self._torch.cuda.synchronize()
        return _CALLS / (time.perf_counter() - began)


async def _ask(program: ta.programs.Program[Any], method: str, args: Sequence[Any]) -> float:
    """Return the batches a second of all askers."""
    answers, began = 0, time.perf_counter()

    async def ask() -> None:
        nonlocal answers
        while time.perf_counter() < began + _SECONDS:
            await program.ask(method, *args)
            answers += 1

    async with trio.open_nursery() as nursery:
        for _ in range(_ASKERS):
            nursery.start_soon(ask)
    return answers / (time.perf_counter() - began)


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.real_modules")
    parser.add_argument("what", choices=("recover", "rates"))
    parser.add_argument(
        "rounds", type=int, nargs="?", help="losses of each kind (default: 10), or turns (default: 4)"
    )
    given = parser.parse_args(arguments)
    is_recovery = given.what == "recover"
    needed = ("torch", "transformers", "timm") if is_recovery else ("torch", "transformers")
    missing = [name for name in needed if find_spec(name) is None]
    if missing:
        sys.exit(f"real_modules: {given.what} needs {' and '.join(missing)}, which cannot be imported here")
    # Workers look for the encoder's module there too.
    sys.path.insert(0, str(_ROOT / "examples" / "encode"))
    trio.run(recover if is_recovery else rates, given.rounds or (10 if is_recovery else 4))


if __name__ == "__main__":
    main()
