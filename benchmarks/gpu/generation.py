"""Text of a model of SmolLM2's shape with random weights: ``python -m benchmarks.gpu.generation [PART ...]``.

The model is that of ``examples/generate``, as a PyTorch program in a worker. Parts:

* ``decode``: tokens a second of 1, 8, 32 and 64 sequences, each read by `open_parts`; beside a plain PyTorch
  loop of the same forward, with static batches whose state stays on the device, in turns. bfloat16.
* ``transformers``: the same requests as a whole by the continuous batching of `transformers`.
* ``first``: steps until the first token of a short prompt, beside 32 sequences and a prompt of 4000 tokens.
* ``faults``: 200 readers, while every 2 s the worker is killed or another operation writes to a bad address.
  Each text is compared with that of an undisturbed run. float64, because rounding depends on the batch;
  bfloat16 with ``--exact``.
* ``swaps``: readers while an adapter is swapped in or out each second, with the faults of ``faults``. Each
  text is compared with the texts of models whose weights NumPy has changed, one for each adapter. Always
  ``--exact``.
* ``replicas``: a model on each of ``--devices``, behind one router. First nobody disturbs them, and then the
  worker of one is killed each second. Each text is compared with that of an undisturbed run.

``--backend cpu`` and ``--small`` try it without a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import chain, cycle, pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel.patterns import GetStatistics, Router, open_parts
from trio_accel.testing import inject_fault

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "generate"))

llama, model_of, generation_of, text = map(import_module, ("llama", "model", "generation", "text"))

__all__ = ["main"]

SIZE, PROMPT, MADE = 16, 32, 128
SMALL = llama.Config(
    layers=2, heads=4, groups=2, width=16, inner=96, words=512, context=8192, base=1e4, epsilon=1e-5
)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _prompts(config: Any, count: int, length: int = PROMPT) -> list[list[int]]:
    random = np.random.default_rng(7)
    return random.integers(3, config.words, (count, length)).tolist()  # type: ignore[no-any-return]


def _prompt(tokens: Sequence[int], most: int) -> Any:
    return generation_of.Prompt(tokens=list(tokens), most=most, sampling=model_of.GREEDY)


class Endless:
    """A text that no token ends."""

    ends: frozenset[int] = frozenset()


@attrs.frozen(kw_only=True)
class Setting:
    """What is measured on what."""

    backend: str
    config: Any
    weights: Any
    forward: str | None
    exact: bool = False

    @asynccontextmanager
    async def open(
        self, *, dtype: str, pages: int, sequences: int, options: ta.DeviceOptions
    ) -> AsyncGenerator[Any, None]:
        """Open a model in a worker, with its batcher; no token ends a text."""
        kind = "float32" if self.backend == "cpu" and dtype == "bfloat16" else dtype
        async with (
            ta.open_system("generation") as system,
            system.open_device(self.backend, options=options) as device,
            model_of.open_model(
                device,
                self.config,
                self.weights,
                pages=pages,
                size=SIZE,
                dtype=kind,
                forward=self.forward,
                exact=64 * self.exact,
            ) as model,
        ):
            loaded = text.Loaded(name="random", config=self.config, weights=self.weights, text=Endless())
            most = max(512, sequences)
            opening = generation_of.open_generation(
                system, model, loaded, sequences=sequences, positions=most
            )
            async with opening as generation:
                yield generation


async def _read(batcher: Any, tokens: Sequence[int], most: int, found: list[tuple[float, int]]) -> None:
    async with open_parts(batcher, _prompt(tokens, most)) as stream:
        async for token in stream:
            found.append((time.perf_counter(), token))  # noqa: PERF401  # what came before an error counts


async def _read_all(
    batcher: Any, prompts: Sequence[Sequence[int]], most: int
) -> list[list[tuple[float, int]]]:
    found: list[list[tuple[float, int]]] = [[] for _ in prompts]
    async with trio.open_nursery() as nursery:
        for tokens, one in zip(prompts, found, strict=True):
            nursery.start_soon(_read, batcher, tokens, most, one)
    return found


class Plain:
    """What a user writes by hand: the same forward here, and one batch whose state stays on the device."""

    def __init__(self, setting: Setting, dtype: str) -> None:
        torch = self.torch = import_module("torch")
        self.on = "cuda" if setting.backend.startswith("cuda") else "cpu"
        kind = getattr(torch, "float32" if self.on == "cpu" else dtype)
        self.config, self.kind = setting.config, kind
        weights = {name: torch.from_numpy(one).to(self.on, kind) for name, one in setting.weights.items()}
        cls = import_module("llama_torch").TorchLlama
        self.make = partial(cls, weights, config=attrs.asdict(setting.config))
        # Kept for all turns, with their graphs: to capture one takes as long as many steps.
        self.models: dict[int, Any] = {}

    def captured(self, llama_here: Any, rows: Any, tables: Any, ends: Any) -> Any:
        """The forward as a CUDA graph."""
        return llama_here.logits(rows, tables, ends, ())

    def eager(self, llama_here: Any, rows: Any, tables: Any, ends: Any) -> Any:
        """The forward without CUDA graphs."""
        with self.torch.inference_mode():
            return llama_here.forward(rows, tables, ends, ()).float()

    def decode(
        self, prompts: Sequence[Sequence[int]], most: int, *, graphs: bool
    ) -> tuple[float, list[list[int]]]:
        """Return the seconds of all tokens behind the first, and the tokens."""
        torch, count = self.torch, len(prompts)
        each = -(-(len(prompts[0]) + most) // SIZE)
        shape = self.config.cache_shape(count * each, SIZE)
        if count not in self.models:
            caches = [torch.zeros(shape, dtype=self.kind, device=self.on) for _ in range(self.config.layers)]
            self.models[count] = self.make(caches)
        llama_here = self.models[count]
        tables = torch.arange(count * each, device=self.on).reshape(count, each)
        runs = [
            model_of.Run(tokens=list(tokens), start=0, pages=range(number * each, (number + 1) * each))
            for number, tokens in enumerate(prompts)
        ]
        batch = model_of.Batch.of(runs, self.config, count * each, SIZE)
        given = [torch.from_numpy(one).to(self.on) for one in (batch.rows, batch.tables, batch.ends)]
        tokens = llama_here.logits(*given, batch.counts).argmax(dim=1)
        made, length, lines = [tokens.tolist()], len(prompts[0]), torch.arange(count, device=self.on)
        step: Any = partial(self.captured if graphs else self.eager, llama_here)
        began = time.perf_counter()
        for position in range(length, length + most - 1):
            at = torch.full((count,), position, device=self.on)
            rows = torch.stack([tokens, at, tables[:, position // SIZE] * SIZE + position % SIZE])
            tokens = step(rows, tables[:, : position // SIZE + 1], lines).argmax(dim=1)
            made.append(tokens.tolist())
        return time.perf_counter() - began, [list(one) for one in zip(*made, strict=True)]


async def decode(setting: Setting) -> None:
    """Print tokens a second of static batches."""
    plain = Plain(setting, "bfloat16")
    options = ta.DeviceOptions(isolation="process", preload=("torch",))
    _say("decode: tokens a second, ours from a worker; plain PyTorch, and ours / it; the same by CUDA graphs")
    async with setting.open(dtype="bfloat16", pages=1024, sequences=64, options=options) as generation:
        for count in (1, 8, 32, 64):
            prompts, rates, same = _prompts(setting.config, count), list[tuple[float, ...]](), 0.0
            for turn in range(4):
                found = await _read_all(generation.batcher, prompts, MADE)
                began = max(one[0][0] for one in found)
                behind = [moment for one in found for moment, _ in one if moment > began]
                row = [len(behind) / (max(behind) - began)]
                for graphs in (False, True):
                    seconds, tokens = plain.decode(prompts, MADE, graphs=graphs)
                    row.append(count * (MADE - 1) / seconds)
                    ours = [token for one in found for _, token in one]
                    same = statistics.mean(a == b for a, b in zip(ours, chain(*tokens), strict=True))
                if turn:
                    rates.append(tuple(row))
            mine, eager, graph = (statistics.median(one) for one in zip(*rates, strict=True))
            repeated = (await generation.batcher.ask(GetStatistics())).repeated
            _say(
                f"  {count:3} sequences {mine:8.0f} {eager:8.0f} {mine / eager:6.2f} {graph:8.0f} "
                f"{mine / graph:6.2f}   (equal tokens: {same:.2f}, steps repeated: {repeated})"
            )


async def transformers(setting: Setting) -> None:
    """Print the tokens a second of whole requests, beside the batching of transformers."""
    options = ta.DeviceOptions(isolation="process", preload=("torch",))
    _say("transformers: whole requests of 32 + 128 tokens, tokens a second, ours and theirs")
    torch, theirs = import_module("torch"), import_module("transformers")
    config = setting.config
    shape = theirs.LlamaConfig(
        vocab_size=config.words,
        hidden_size=config.heads * config.width,
        intermediate_size=config.inner,
        num_hidden_layers=config.layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.groups,
        head_dim=config.width,
        max_position_embeddings=config.context,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    on = "cuda" if setting.backend.startswith("cuda") else "cpu"
    network = theirs.LlamaForCausalLM(shape).to(on, torch.bfloat16).eval()
    how = theirs.GenerationConfig(max_new_tokens=MADE, do_sample=False, eos_token_id=-1, pad_token_id=0)
    async with setting.open(dtype="bfloat16", pages=1024, sequences=64, options=options) as generation:
        for count in (8, 64, 256):
            prompts, ours, other, tokens = _prompts(config, count), 0.0, 0.0, 0
            for _ in range(2):  # the first is a warm-up
                began = time.perf_counter()
                await _read_all(generation.batcher, prompts, MADE)
                ours = count * MADE / (time.perf_counter() - began)
                began = time.perf_counter()
                made = network.generate_batch(inputs=prompts, generation_config=how)
                tokens = sum(len(one.generated_tokens) for one in made.values())
                other = tokens / (time.perf_counter() - began)
            _say(f"  {count:3} requests {ours:8.0f} {other:8.0f} {ours / other:6.2f}   ({tokens} of theirs)")


async def first(setting: Setting) -> None:
    """Print how many steps a short prompt waits for its first token."""
    options = ta.DeviceOptions(isolation="process", preload=("torch",))
    async with setting.open(dtype="bfloat16", pages=2048, sequences=64, options=options) as generation:
        prompts = _prompts(setting.config, 33)
        found: list[list[tuple[float, int]]] = [[] for _ in prompts]
        async with trio.open_nursery() as nursery:
            for tokens, one in zip(prompts[:32], found, strict=False):
                nursery.start_soon(_read, generation.batcher, tokens, 400, one)
            while not all(found[:32]):  # noqa: ASYNC110  # readers write there
                await trio.sleep(0.005)
            long: list[tuple[float, int]] = []
            nursery.start_soon(_read, generation.batcher, _prompts(setting.config, 1, 4000)[0], 4, long)
            await trio.sleep(0.01)
            before, began = (await generation.batcher.ask(GetStatistics())).steps, time.perf_counter()
            async with open_parts(generation.batcher, _prompt(prompts[32], 8)) as stream:
                await anext(stream)
                took, now = time.perf_counter() - began, (await generation.batcher.ask(GetStatistics())).steps
                still = not long
            nursery.cancel_scope.cancel()
        _say(
            f"first: the first token of a short prompt came in {took * 1e3:.0f} ms, {now - before} steps "
            f"were begun meanwhile; the prompt of 4000 tokens was {'still' if still else 'not'} going through"
        )


@attrs.define
class Faults:
    """What became of readers under faults."""

    generations: list[Any]
    batcher: Any
    prompts: list[list[int]]
    expected: list[list[int]]
    right: int = 0
    wrong: list[str] = attrs.field(factory=list[str])
    broken: list[str] = attrs.field(factory=list[str])
    gaps: list[float] = attrs.field(factory=list[float])
    moments: list[float] = attrs.field(factory=list[float])
    struck: list[tuple[str, float]] = attrs.field(factory=list[tuple[str, float]])

    async def read(self, number: int, deadline: float) -> None:
        """Read texts until a deadline."""
        while trio.current_time() < deadline:
            found: list[tuple[float, int]] = []
            try:
                await _read(self.batcher, self.prompts[number], len(self.expected[number]), found)
            except Exception as error:  # noqa: BLE001  # a broken stream is a finding
                self.broken.append(repr(error)[:200])
            moments = [moment for moment, _ in found]
            self.moments.extend(moments)
            self.gaps.extend(b - a for a, b in pairwise(moments))
            if [token for _, token in found] == self.expected[number]:
                self.right += 1
            else:
                self.wrong.append(f"prompt {number}, {len(found)} tokens")

    async def hurt(self, device: ta.Device, *, poisons: bool) -> None:
        """Kill the worker and write to a bad address in turns, every two seconds."""
        x = await device.put(np.ones(8))
        while True:
            await trio.sleep(2.0)
            kind = "address" if len(self.struck) % 2 and poisons else "kill"
            self.struck.append((kind, time.perf_counter()))
            if kind == "kill":
                inject_fault(device, self.generations[0].model.operation, kill=True)
                continue
            inject_fault(device, "arrays.add", poison=True)
            with suppress(ta.AccelError):
                await (x + x)

    async def kill_in_turn(self) -> None:
        """Kill the worker of one replica after the other, one each second."""
        while True:
            await trio.sleep(1.0)
            one = self.generations[len(self.struck) % len(self.generations)]
            self.struck.append(("kill", time.perf_counter()))
            inject_fault(one.model.caches[0].device, one.model.operation, kill=True)

    def stood_still(self, kind: str) -> list[float]:
        """For each fault of a kind, the longest time in which no reader got anything."""
        every, found = np.sort(self.moments), list[float]()
        for what, moment in self.struck:
            near = every[(every > moment - 0.1) & (every < moment + 1.9)]
            if what == kind and len(near) > 1:
                found.append(float(np.diff(near).max()))
        return found


async def faults(setting: Setting, *, seconds: float, spares: int, readers: int, made: int = 200) -> None:
    """Print what faults have cost the readers."""
    options = ta.DeviceOptions(
        isolation="process",
        retry=3,
        spares=spares,
        preload=("torch",),
        backoff=ta.Backoff(base=0.0),
        intensity=ta.Intensity(10_000, 60.0),
    )
    prompts = _prompts(setting.config, readers)
    pages = readers * -(-(PROMPT + made) // SIZE)
    # An exact model has the same bits in any batch.
    dtype = "bfloat16" if setting.exact else "float64"
    opening = setting.open(dtype=dtype, pages=pages, sequences=readers, options=options)
    async with opening as generation:
        device = generation.model.caches[0].device
        began = time.perf_counter()
        alone = await _read_all(generation.batcher, prompts, made)
        took = time.perf_counter() - began
        expected = [[token for _, token in one] for one in alone]
        found = Faults([generation], generation.batcher, prompts, expected)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(found.hurt, device, poisons=setting.backend.startswith("cuda")))
            async with trio.open_nursery() as inner:
                for number in range(readers):
                    inner.start_soon(found.read, number, trio.current_time() + seconds)
            nursery.cancel_scope.cancel()
        seen = await generation.batcher.ask(GetStatistics())
        _say(
            f"faults, {spares} spare: {readers} readers for {seconds:.0f} s, {len(found.struck)} faults, "
            f"{device.generation} contexts: {found.right} texts of {made} tokens right, "
            f"{len(found.wrong)} wrong, {len(found.broken)} broken; longest gap {max(found.gaps):.2f} s, "
            f"median {statistics.median(found.gaps) * 1e3:.0f} ms; one round alone {took:.1f} s; "
            f"{seen.steps} steps, {seen.repeated} repeated; pages used afterwards: {generation.pages.used}"
        )
        for line in (*found.wrong[:3], *found.broken[:3]):
            _say(f"    {line}")
        for kind in ("kill", "address"):
            stood = ", ".join(f"{one:.2f}" for one in found.stood_still(kind))
            _say(f"    all stood still after each {kind}: {stood} s")
        _say(f"    recovery: {device.recovery}")


class Swaps(Faults):
    """What became of readers under faults, while adapters were swapped.

    Attributes:
        texts: The undisturbed text of each prompt, by the name of the adapter.
        names: The adapters in the order of their swaps; the last one may be under way.
        begun: How many texts are those of each adapter.
        took: The seconds of each swap.
    """

    def __init__(self, generation: Any, prompts: list[list[int]], texts: dict[str | None, list[list[int]]]):
        super().__init__([generation], generation.batcher, prompts, texts[None])
        self.texts, self.names, self.took = texts, list[str | None]([None]), list[float]()
        self.begun, self.current = Counter[str | None](), 0

    async def read(self, number: int, deadline: float) -> None:
        """Read texts until a deadline; each must be the text of an adapter that was there when it began."""
        while trio.current_time() < deadline:
            found: list[tuple[float, int]] = []
            first, last = self.current, len(self.names)
            try:
                async with open_parts(self.batcher, _prompt(self.prompts[number], MADE)) as stream:
                    async for token in stream:
                        if not found:
                            last = len(self.names)
                        found.append((time.perf_counter(), token))
            except Exception as error:  # noqa: BLE001  # a broken stream is a finding
                self.broken.append(repr(error)[:200])
            self.gaps.extend(b - a for (a, _), (b, _) in pairwise(found))
            made = [token for _, token in found]
            name = next((one for one in self.names[first:last] if self.texts[one][number] == made), "")
            if name != "":
                self.right += 1
                self.begun[name] += 1
            else:
                self.wrong.append(f"prompt {number}, {len(found)} tokens, of {self.names[first:last]}")

    async def swap(self, adapters: Any, folder: Path) -> None:
        """Swap to the next adapter each second, or to none."""
        for name in cycle([*filter(None, self.texts), None]):
            await trio.sleep(1.0)
            self.names.append(name)
            began = time.perf_counter()
            await adapters.swap(None if name is None else folder / name)
            self.took.append(time.perf_counter() - began)
            self.current = len(self.names) - 1


def _write_adapter(path: Path, config: Any, seed: int) -> dict[str, Any]:
    """Write an adapter of random numbers, and return the change of each weight by NumPy."""
    random, saved, changes = np.random.default_rng(seed), dict[str, Any](), dict[str, Any]()
    numbers, rank, alpha = config.heads * config.width, 8, 16.0
    for layer in range(config.layers):
        for name, out, into in (
            ("query_key_value", (config.heads + 2 * config.groups) * config.width, numbers),
            ("down", numbers, config.inner),
        ):
            a, b = (random.normal(0, 0.02, shape).astype(np.float32) for shape in ((rank, into), (out, rank)))
            at = f"layers.{layer}.{name}"
            saved |= {f"{at}.lora_A.weight": a, f"{at}.lora_B.weight": b}
            changes[f"{layer}.{name}"] = np.float32(alpha / rank) * (b @ a)
    ta.train.Lora(["layers.*"], rank=rank, alpha=alpha).save(path, saved)
    return changes


async def swaps(setting: Setting, *, seconds: float, readers: int) -> None:
    """Print what swaps of adapters and faults have cost the readers."""
    adapters_of = import_module("adapters")
    options = ta.DeviceOptions(
        isolation="process",
        retry=3,
        spares=1,
        preload=("torch",),
        backoff=ta.Backoff(base=0.0),
        intensity=ta.Intensity(10_000, 60.0),
    )
    setting, prompts = attrs.evolve(setting, exact=True), _prompts(setting.config, readers)
    pages = 2 * readers * -(-(PROMPT + MADE) // SIZE)
    shape: dict[str, Any] = {"dtype": "bfloat16", "pages": pages, "sequences": readers, "options": options}
    with TemporaryDirectory() as made:
        folder, changed = Path(made), dict[str | None, dict[str, Any]]({None: {}})
        for seed, name in enumerate(("one", "two")):
            changed[name] = _write_adapter(folder / name, setting.config, seed)
        texts = dict[str | None, list[list[int]]]()
        for adapter, changes in changed.items():
            weights = {name: one + changes.get(name, 0) for name, one in setting.weights.items()}
            async with attrs.evolve(setting, weights=weights).open(**shape) as alone:
                found = await _read_all(alone.batcher, prompts, MADE)
            texts[adapter] = [[token for _, token in one] for one in found]
        different = sum(len({tuple(one[at]) for one in texts.values()}) == 3 for at in range(readers))
        async with (
            setting.open(**shape) as generation,
            adapters_of.open_adapters(generation, folder=folder) as adapters,
        ):
            device = generation.model.caches[0].device
            memory, seen = (await device.statistics()).memory.used, Swaps(generation, prompts, texts)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(partial(seen.hurt, device, poisons=setting.backend.startswith("cuda")))
                async with trio.open_nursery() as inner:
                    inner.start_soon(seen.swap, adapters, folder)
                    async with trio.open_nursery() as reading:
                        for number in range(readers):
                            reading.start_soon(seen.read, number, trio.current_time() + seconds)
                    inner.cancel_scope.cancel()
                nursery.cancel_scope.cancel()
            await adapters.swap(None)
            # Tasks that watch the workers wake up each second, so the loop is never idle for longer.
            await trio.sleep(1.0)
            more = (await device.statistics()).memory.used - memory
            _say(
                f"swaps: {readers} readers for {seconds:.0f} s, {len(seen.took)} swaps "
                f"({max(seen.took, default=0):.2f} s at most), {len(seen.struck)} faults, "
                f"{device.generation} contexts: {seen.right} texts of {MADE} tokens right "
                f"({dict(seen.begun)}; {different} of {readers} prompts have three texts), "
                f"{len(seen.wrong)} wrong, {len(seen.broken)} broken; longest gap {max(seen.gaps):.2f} s; "
                f"{more} bytes of memory more afterwards, pages used: {generation.pages.used}"
            )
            for line in (*seen.wrong[:3], *seen.broken[:3]):
                _say(f"    {line}")


async def replicas(setting: Setting, devices: Sequence[str], *, seconds: float, readers: int) -> None:
    """Print how many streams replicas make, and what a kill each second has cost them."""
    options = ta.DeviceOptions(
        isolation="process",
        retry=3,
        preload=("torch",),
        backoff=ta.Backoff(base=0.0),
        intensity=ta.Intensity(10_000, 60.0),
    )
    prompts, made = _prompts(setting.config, readers), 100
    pages = readers * -(-(PROMPT + made) // SIZE)
    async with AsyncExitStack() as stack:
        opened = list[Any]()
        for name in devices:
            one = attrs.evolve(setting, backend=name)
            opening = one.open(dtype="float64", pages=pages, sequences=readers, options=options)
            opened.append(await stack.enter_async_context(opening))
        system = await stack.enter_async_context(ta.open_system("replicas"))
        router = await system.spawn(Router, [one.batcher for one in opened])
        alone = await _read_all(opened[0].batcher, prompts, made)
        expected = [[token for _, token in one] for one in alone]
        for kills in (False, True):
            found = Faults(opened, router, prompts, expected)
            async with trio.open_nursery() as nursery:
                if kills:
                    nursery.start_soon(found.kill_in_turn)
                began = time.perf_counter()
                async with trio.open_nursery() as inner:
                    for number in range(readers):
                        inner.start_soon(found.read, number, trio.current_time() + seconds)
                took = time.perf_counter() - began
                nursery.cancel_scope.cancel()
            _say(
                f"replicas, {len(devices)} on {len(set(devices))} devices, {readers} readers, "
                f"{len(found.struck)} kills: {found.right} streams of {made} tokens right, "
                f"{found.right / took:.1f} a second, {len(found.wrong)} wrong, {len(found.broken)} broken; "
                f"longest gap {max(found.gaps):.2f} s; "
                f"contexts {[one.model.caches[0].device.generation for one in opened]}"
            )
            for line in (*found.wrong[:3], *found.broken[:3]):
                _say(f"    {line}")


async def _main(given: argparse.Namespace) -> None:
    config = SMALL if given.small else text.SMOLLM2
    weights = llama.random_weights(config)
    setting = Setting(
        backend=given.backend, config=config, weights=weights, forward=given.forward, exact=given.exact
    )
    for part in given.parts or ["decode", "transformers", "first", "faults"]:
        began = time.perf_counter()
        try:
            if part == "faults":
                for spares in (0, 1):
                    await faults(setting, seconds=given.seconds, spares=spares, readers=given.readers)
            elif part == "swaps":
                await swaps(setting, seconds=given.seconds, readers=given.readers)
            elif part == "replicas":
                names = given.devices.split(",")
                await replicas(setting, names, seconds=given.seconds, readers=given.readers)
            else:
                await {"decode": decode, "transformers": transformers, "first": first}[part](setting)
        except Exception as error:  # the other parts are measured all the same
            _say(f"{part} failed: {error!r}")
            if given.traceback:
                raise
        _say(f"  ({part}: {time.perf_counter() - began:.0f} s)")


def main() -> None:
    """Read the arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts: list[Any] = ["decode", "transformers", "first", "faults", "swaps", "replicas", []]
    parser.add_argument("parts", nargs="*", choices=parts)
    parser.add_argument("--devices", default="cuda:0", help="of replicas, one each; a device may stand twice")
    parser.add_argument("--backend", default="cuda")
    parser.add_argument("--forward", choices=["torch", "numpy", "operations"])
    parser.add_argument("--exact", action="store_true", help="texts that are the same in any company")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script")
    parser.add_argument("--seconds", type=float, default=60.0, help="how long faults last")
    parser.add_argument("--readers", type=int, default=200)
    parser.add_argument("--traceback", action="store_true")
    trio.run(_main, parser.parse_args())


if __name__ == "__main__":
    main()
