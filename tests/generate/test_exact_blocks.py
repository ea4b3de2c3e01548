"""`examples/generate`, exact, where the bits of a row depend on its index in a product of many rows."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trio
from chosen import BACKEND, SEARCHED
from dependent_llama import INDEPENDENT_ROWS, DependentLlama
from generation import Prompt, open_generation
from llama import Llama, random_weights
from model import Model, Run, Sampling, open_model
from running import TINY
from text import load_random

import trio_accel as ta
from trio_accel.patterns import Submit

pytestmark = pytest.mark.examples
if BACKEND != "cpu":
    pytest.skip("NumPy computes on the CPU alone", allow_module_level=True)

WEIGHTS = random_weights(TINY, 3)
TEXTS = [np.random.default_rng(n).integers(0, TINY.words, 1 + 5 * n % 9).tolist() for n in range(14)]
INLINE = ta.DeviceOptions(isolation="inline")


async def likely(model: Model, runs: Sequence[Run]) -> list[Any]:
    tokens: list[Any] = await model.step(runs)
    return [token.likely for token in tokens]


async def check_company(rows: int) -> None:
    """Each text has the same likelihoods on its own, token by token, and among the others, in any chunks."""
    async with (
        ta.open_system("blocks") as system,
        system.open_device("cpu", options=INLINE) as device,
        open_model(device, TINY, WEIGHTS, pages=64, forward="numpy", exact=rows) as model,
    ):
        alone = []
        for text in TEXTS:
            for at, token in enumerate(text):
                run = Run(tokens=[token], start=at, pages=[0, 1], is_asked=True)
                found = await likely(model, [run])
            alone += found
        for chunk in (2, 100):
            done, last = [0] * len(TEXTS), list[Any](TEXTS)
            while going := [number for number, text in enumerate(TEXTS) if done[number] < len(text)]:
                runs = [
                    Run(
                        tokens=TEXTS[number][done[number] : done[number] + chunk],
                        start=done[number],
                        pages=[2 * number + 2, 2 * number + 3],
                        is_asked=True,
                    )
                    for number in going
                ]
                for number, run, found_one in zip(going, runs, await likely(model, runs), strict=True):
                    done[number], last[number] = run.length, found_one
            assert last == alone


@pytest.mark.parametrize("most", [12, 4, 1])
def test_products_are_divided_until_their_rows_are_independent(
    most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    product, blocks, first = Llama._product, set[int](), 12

    def dependent(self: Llama, name: str, x: Any) -> Any:
        """Compute the rows from `first` on by another kernel."""
        made = product(self, name, x)
        made[first:] *= np.float32(1 + 2e-7)
        blocks.add(len(x))
        return made

    monkeypatch.setattr(Llama, "_product", dependent)
    trio.run(check_company, 12)
    # The processor may have kernels for fewer rows, too.
    own, first = min(blocks), most
    blocks.clear()
    trio.run(check_company, 12)
    assert min(blocks) == min(most, own)


def test_a_model_with_other_weights_has_the_same_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    product, blocks = Llama._product, list[int]()

    def dependent(self: Llama, name: str, x: Any) -> Any:
        blocks.append(self.block)
        made = product(self, name, x)
        made[4:] += 1
        return made

    async def step_other() -> None:
        async with (
            ta.open_system("blocks") as system,
            system.open_device("cpu", options=INLINE) as device,
            open_model(device, TINY, WEIGHTS, pages=64, forward="numpy", exact=8) as model,
            model.with_weights({}) as other,
        ):
            blocks.clear()
            await other.step([Run(tokens=[1], start=0, pages=[0])])

    monkeypatch.setattr(Llama, "_product", dependent)
    trio.run(step_other)
    assert set(blocks) == {4}


@pytest.mark.parametrize("kind", ["Haswell", "SkylakeX"])
def test_processors_with_and_without_avx_512(kind: str) -> None:
    """OpenBLAS computes as on another processor, which this one must contain."""
    program = "import test_exact_blocks as t, trio; trio.run(t.check_company, 16)"
    environment = {
        **os.environ,
        "OPENBLAS_CORETYPE": kind,
        "OPENBLAS_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([SEARCHED, *sys.path]),
    }
    if kind != "SkylakeX":
        environment["NPY_DISABLE_CPU_FEATURES"] = (
            "AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL"
        )
    found = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    if found.returncode < 0:
        pytest.skip(f"this processor cannot compute as {kind}")
    assert found.returncode == 0, found.stderr


LOADED = load_random(TINY, 3)
PROMPTS = [
    Prompt(tokens=text, most=10, sampling=Sampling(temperature=1.0, seed=number))
    for number, text in enumerate(TEXTS[:6])
]
RETRIES = ta.DeviceOptions(
    isolation="process",
    retry=1,
    retry_suspects=True,
    backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
)


async def texts_of(device: ta.Device, exact: int, *, sequences: int, kills: int = 0) -> list[tuple[int, ...]]:
    """Generate the texts on a device, whose worker is killed so often, each time after four steps."""
    texts: dict[int, tuple[int, ...]] = {}
    async with (
        open_model(device, TINY, LOADED.weights, pages=64, size=4, forward="numpy", exact=exact) as model,
        ta.open_system("texts") as system,
        open_generation(system, model, LOADED, sequences=sequences) as made,
    ):
        faults = []
        for _ in range(kills):
            ta.testing.inject_fault(device, model.operation, delay=0.0, count=4)
            faults.append(ta.testing.inject_fault(device, model.operation, kill=True))

        async def ask(number: int) -> None:
            texts[number] = await made.batcher.ask(Submit(PROMPTS[number]))

        async with trio.open_nursery() as nursery:
            for number in range(len(PROMPTS)):
                nursery.start_soon(ask, number)
        assert [fault.hit for fault in faults] == [1] * kills
        await made.batcher.stop(drain=True)
    return [texts[number] for number in range(len(PROMPTS))]


@pytest.mark.parametrize("isolation", ["process"])
async def test_random_texts_in_small_blocks_survive_kills(
    system: ta.System, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six texts at temperature 1 share steps of 16 rows, whose products are divided."""
    import model as models

    tried, has_same_bits = list[bool](), models._has_same_bits

    async def note(*arguments: Any) -> bool:
        tried.append(await has_same_bits(*arguments))
        return tried[-1]

    monkeypatch.setattr(models, "_program", lambda _: DependentLlama)
    monkeypatch.setattr(models, "_has_same_bits", note)
    async with system.open_device(BACKEND, options=RETRIES) as device:
        alone = await texts_of(device, 16, sequences=1)
        # Of 16, 8 and 4 rows, only the last ones are independent.
        assert (tried, INDEPENDENT_ROWS) == ([False, False, True], 4)
        assert len({*alone}) == len(alone)
        assert await texts_of(device, 16, sequences=6, kills=2) == alone
        # Products of 16 rows at once have other bits, and give other texts.
        monkeypatch.setattr(models, "_blocks_of", lambda exact: [exact])
        monkeypatch.setattr(models, "_has_same_bits", _always)
        assert await texts_of(device, 16, sequences=6) != alone


async def _always(*_: Any) -> bool:
    await trio.lowlevel.checkpoint()
    return True
