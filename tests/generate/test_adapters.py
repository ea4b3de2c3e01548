"""`examples/generate/adapters.py`: adapters swapped while texts are made, and the refusals."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import trio
from chosen import BACKEND
from model import GREEDY, Sampling, open_model
from running import FORWARDS, TINY
from text import load_random

import trio_accel as ta
from trio_accel import train
from trio_accel.patterns import GetStatistics, Submit, open_parts

pytestmark = [pytest.mark.examples, pytest.mark.timeout(120)]
for package in ("tokenizers", "jinja2", "llguidance", "pydantic", "starlette", "safetensors"):
    pytest.importorskip(package, reason="pip install '.[generate,http,adapters]'")
if BACKEND != "cpu":
    pytest.skip("these programs compute on the CPU here", allow_module_level=True)

from adapters import Adapters, open_adapters, read_adapter  # noqa: E402  # which need the packages
from completions import Service, application  # noqa: E402
from constraints import Grammars  # noqa: E402
from generation import Generation, Prompt, open_generation  # noqa: E402

LOADED = load_random(TINY, 3)
# No text ends before it has all its tokens.
LOADED.text.ends = frozenset()
SIZE = 4
INLINE = ta.DeviceOptions(isolation="inline")
SURVIVES = ta.DeviceOptions(
    isolation="process",
    retry=1,
    retry_suspects=True,
    spares=1,
    backoff=ta.Backoff(initial=0.0, base=0.0, jitter=0.0),
)
STREAMS, MOST = 30, 24
# An equal beginning for all, which they share in pages.
PROMPTS = [
    Prompt(
        tokens=[*range(40, 54), *range(number, number + number % 5)],
        most=MOST,
        sampling=Sampling(temperature=0.9, top_p=0.95, seed=number) if number % 2 else GREEDY,
    )
    for number in range(STREAMS)
]
KEY = "the key of the administration"


def write(
    path: Path, seed: int, *, rank: int = 2, base: int = 0, config: Any = TINY, saved: Any = train.Lora
) -> Path:
    """Write an adapter of random numbers, as large as the weights are."""
    random, arrays = np.random.default_rng(seed), dict[str, Any]()
    numbers = config.heads * config.width
    for layer in range(config.layers):
        for name, out, into in (
            ("query_key_value", (config.heads + 2 * config.groups) * config.width, numbers),
            ("down", numbers, config.inner),
        ):
            at = f"layers.{layer}.{name}"
            arrays[f"{at}.lora_A.weight"] = random.normal(0, 0.3, (rank, into)).astype(np.float32)
            arrays[f"{at}.lora_B.weight"] = random.normal(0, 0.3, (out, rank)).astype(np.float32)
    saved(["layers.*"], rank=rank, alpha=2.0 * rank).save(path, arrays, base=base)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    write(made / "one", 1)
    write(made / "two", 2, rank=3)
    return made


def changed(path: Path) -> dict[str, Any]:
    """The weights with an adapter, only by NumPy."""
    found: dict[str, Any] = import_module("safetensors.numpy").load_file(path)
    weights = dict(LOADED.weights)
    for name, a in found.items():
        if name.endswith(".lora_A.weight"):
            layer = name.removesuffix(".lora_A.weight")
            change = np.float32(2) * (found[f"{layer}.lora_B.weight"] @ a)
            weights[layer.removeprefix("layers.")] = weights[layer.removeprefix("layers.")] + change
    return weights


@asynccontextmanager
async def opened(
    system: ta.System, device: ta.Device, forward: str = "numpy", exact: int = 8, **given: Any
) -> AsyncGenerator[Generation]:
    opening = open_model(
        device, TINY, LOADED.weights, pages=given.pop("pages", 60), size=SIZE, forward=forward, exact=exact
    )
    async with opening as model, open_generation(system, model, LOADED, **given) as made:
        yield made
        await made.batcher.stop(drain=True)
        assert made.pages.used == 0


async def ask(made: Generation, number: int) -> tuple[int, ...]:
    return await made.batcher.ask(Submit(PROMPTS[number]))


async def alone(
    weights: Mapping[str, Any], forward: str = "numpy", exact: int = 8, count: int = STREAMS
) -> list[tuple[int, ...]]:
    """The texts of a model without disturbances and changes."""
    async with (
        ta.open_system("alone") as system,
        system.open_device("cpu", options=INLINE) as device,
        open_model(device, TINY, weights, pages=60, size=SIZE, forward=forward, exact=exact) as model,
        open_generation(system, model, LOADED, sequences=4) as made,
    ):
        found: dict[int, tuple[int, ...]] = {}

        async def put(number: int) -> None:
            found[number] = await ask(made, number)

        async with trio.open_nursery() as nursery:
            for number in range(count):
                nursery.start_soon(put, number)
        await made.batcher.stop(drain=True)
    return [found[number] for number in range(count)]


@cache
def expected(folder: Path, forward: str = "numpy") -> dict[str | None, list[tuple[int, ...]]]:
    weights = {None: LOADED.weights, **{name: changed(folder / name) for name in ("one", "two")}}
    return {name: trio.run(alone, one, forward) for name, one in weights.items()}


@pytest.fixture
def texts(folder: Path) -> dict[str | None, list[tuple[int, ...]]]:
    """The texts of each of the weights, which differ."""
    found = expected(folder)
    for number in range(STREAMS):
        assert len({one[number] for one in found.values()}) == 3
        assert {len(one[number]) for one in found.values()} == {MOST}
    return found


@pytest.mark.parametrize(
    ("forward", "ahead"),
    [("numpy", False), ("numpy", True), pytest.param("torch", True, marks=pytest.mark.slow)],
)
def test_no_stream_has_mixed_weights(folder: Path, forward: str, ahead: bool) -> None:
    """30 streams, five swaps and ten kills: each has the tokens of the weights that it began with."""
    if find_spec(forward) is None:
        pytest.skip(f"{forward} is not installed")
    trio.run(swaps_under_kills, folder, expected(folder, forward), forward, ahead)


async def swaps_under_kills(folder: Path, texts: Any, forward: str, ahead: bool) -> None:
    swaps = iter(["one", "two", None, "one", "two"])
    found, names = [list[int]() for _ in PROMPTS], list[str | None]()
    async with (
        ta.open_system("swaps") as system,
        system.open_device("cpu", options=SURVIVES) as device,
        # Some are set aside, with their pages on the host or without.
        opened(system, device, forward, pages=60, sequences=10, host=12, ahead=ahead) as made,
        open_adapters(made, folder=folder) as adapters,
    ):
        memory, most = (await device.statistics()).memory.used, 0

        async def read(number: int) -> None:
            async with open_parts(made.batcher, PROMPTS[number]) as stream:
                async for token in stream:
                    found[number].append(token)

        async with trio.open_nursery() as nursery:
            for part in range(10):
                numbers = range(3 * part, 3 * part + 3)
                for number in numbers:
                    names.append(adapters.state()["adapter"])
                    nursery.start_soon(read, number)
                # They begin before the next swap, and end after it.
                while min(len(found[number]) for number in numbers) < 2:  # noqa: ASYNC110  # nobody tells
                    await trio.sleep(0.001)
                fault = ta.testing.inject_fault(device, made.model.operation, kill=True)
                if part % 2 == 0:
                    await adapters.swap(None if (name := next(swaps)) is None else folder / name)
                    most = max(most, len(adapters.state()["in_use"]))
                while not fault.hit:  # noqa: ASYNC110
                    await trio.sleep(0.001)
        assert (await made.batcher.ask(GetStatistics())).set_aside > 0
        # Old weights go with their last stream.
        two = {"adapter": "two", "streams": 0}
        assert adapters.state() == {"object": "adapter", "adapter": "two", "in_use": [two]}
        await adapters.swap(None)
        await settled(device, memory)
        assert device.generation > 10
    assert Counter(names) == {None: 9, "one": 12, "two": 9}
    assert [tuple(tokens) for tokens in found] == [texts[name][at] for at, name in enumerate(names)]
    assert most >= 2


async def settled(device: ta.Device, memory: int) -> None:
    with trio.fail_after(60):
        while (await device.statistics()).memory.used > memory:  # noqa: ASYNC110  # nobody tells of it
            await trio.sleep(0.01)


@pytest.mark.parametrize("forward", [one for one in FORWARDS if one != "torch" or find_spec("torch")])
async def test_each_forward_has_the_weights_of_the_adapter(
    system: ta.System, device: ta.Device, folder: Path, forward: str
) -> None:
    exact = 0 if forward == "operations" else 8
    path = folder / "one"
    weights = {None: LOADED.weights, "one": changed(path)}
    wanted = {name: await alone(one, forward, exact, 4) for name, one in weights.items()}
    async with opened(system, device, forward, exact) as made, open_adapters(made, path=path) as adapters:
        for name in ("one", None, "one"):
            assert adapters.state()["adapter"] == name
            assert [await ask(made, number) for number in range(4)] == wanted[name]
            host = await trio.to_thread.run_sync(adapters.weights)
            for key, array in weights[name].items():
                np.testing.assert_allclose(host[key], array, atol=1e-6)
            await adapters.swap(None if name else path)


async def test_pages_are_shared_only_by_equal_weights(
    system: ta.System, device: ta.Device, folder: Path, texts: Any
) -> None:
    def shared() -> int:
        return made.pages.statistics().shared_tokens

    async with opened(system, device) as made, open_adapters(made) as adapters:
        assert await ask(made, 0) == texts[None][0]
        for name in ("one", "one", "two"):
            await adapters.swap(folder / name)
            before = shared()
            assert await ask(made, 0) == texts[name][0]
            assert shared() == before
            assert await ask(made, 0) == texts[name][0]
            assert shared() > before
        # The weights without an adapter stay, and so do their pages.
        await adapters.swap(None)
        before = shared()
        assert await ask(made, 0) == texts[None][0]
        assert shared() > before


async def test_a_text_that_waits_begins_with_the_new_weights(
    system: ta.System, device: ta.Device, folder: Path, texts: Any
) -> None:
    async with opened(system, device, sequences=1) as made, open_adapters(made) as adapters:
        found: dict[int, tuple[int, ...]] = {}

        async def put(number: int) -> None:
            found[number] = await ask(made, number)

        async with trio.open_nursery() as nursery, open_parts(made.batcher, PROMPTS[0]) as stream:
            first = await anext(stream)
            nursery.start_soon(put, 1)
            await trio.testing.wait_all_tasks_blocked()
            await adapters.swap(folder / "one")
            assert adapters.state()["in_use"] == [
                {"adapter": None, "streams": 1},
                {"adapter": "one", "streams": 0},
            ]
            rest = [token async for token in stream]
        assert (first, *rest) == texts[None][0]
        assert found == {1: texts["one"][1]}


# The refusals, over the interface.


def device_of(adapters: Adapters) -> ta.Device:
    return adapters.generation.model.caches[0].device


@asynccontextmanager
async def admin(
    folder: Path | None,
    key: str | None = KEY,
    *,
    exact: int = 8,
    options: ta.DeviceOptions = INLINE,
    **given: Any,
) -> AsyncGenerator[tuple[Callable[..., Any], Adapters]]:
    """Yield what asks the path of the administration: it returns the status and the JSON."""
    async with (
        ta.open_system("admin") as system,
        system.open_device("cpu", options=options) as device,
        opened(system, device, exact=exact) as made,
        open_adapters(made, key=key, folder=folder, **given) as adapters,
    ):
        app = application(
            Service(generation=made, grammars=Grammars(load_random(TINY, 3)), adapters=adapters)
        )

        async def send(method: str, body: Any = b"", key: str | None = KEY) -> tuple[int, Any]:
            sent = list[Any]()

            async def receive() -> dict[str, Any]:
                return {
                    "type": "http.request",
                    "body": body if isinstance(body, bytes) else json.dumps(body).encode(),
                }

            async def answer(message: Any) -> None:
                sent.append(message)

            headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
            path = "/admin/adapter"
            scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
            await app(scope, receive, answer)
            return sent[0]["status"], json.loads(sent[1]["body"])

        yield send, adapters


async def test_the_state_and_the_swap(folder: Path) -> None:
    async with admin(folder) as (send, _):
        plain = [{"adapter": None, "streams": 0}]
        assert await send("GET") == (200, {"object": "adapter", "adapter": None, "in_use": plain})
        for name in ("one", "two"):
            state = {"object": "adapter", "adapter": name, "in_use": [{"adapter": name, "streams": 0}]}
            assert await send("POST", {"adapter": name}) == (200, state)
            assert await send("GET") == (200, state)
        assert (await send("DELETE"))[1]["in_use"] == plain
        assert (await send("DELETE"))[0] == 200


def error_of(answer: tuple[int, Any]) -> tuple[int, str, str]:
    status, found = answer
    assert found["error"].keys() == {"message", "type", "param", "code"}
    return status, found["error"]["code"], found["error"]["message"]


async def test_requests_other_than_the_administrations(folder: Path) -> None:
    async with admin(folder) as (send, adapters):
        for method, key in (
            ("GET", None),
            ("POST", None),
            ("POST", "other"),
            ("DELETE", ""),
            ("POST", KEY + "x"),
        ):
            status, code, message = error_of(await send(method, {"adapter": "one"}, key))
            assert (status, code) == (401, "invalid_api_key")
            assert message.startswith("/admin/adapter needs the administration key")
        assert adapters.state()["adapter"] is None
        assert error_of(await send("PUT"))[0] == 405
    for place, key in ((folder, None), (None, KEY)):
        async with admin(place, key) as (send, _):
            for method in ("GET", "POST", "DELETE"):
                status, code, message = error_of(await send(method, {"adapter": "one"}))
                assert (status, code) == (403, "admin_disabled")
                assert message.startswith("/admin/adapter is off here: start the service with --admin-key")


def header(**entries: Any) -> bytes:
    text = json.dumps(entries).encode()
    return len(text).to_bytes(8, "little") + text


def damage(path: Path, change: Callable[[bytes], bytes]) -> None:
    path.write_bytes(change(path.read_bytes()))


def numbers(path: Path, value: float) -> None:
    damage(path, lambda data: data[:-4] + np.float32(value).tobytes())


OTHER = attrs.evolve(TINY, layers=3)
WIDE = attrs.evolve(TINY, inner=48)
ABOUT = {"lora": json.dumps({"rank": 2, "alpha": 4.0, "targets": ["x"], "base": 0})}
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "empty": (lambda path: path.write_bytes(b""), "cannot be used: empty has 0 bytes"),
    "text": (lambda path: path.write_text("no adapter at all"), "cannot be used"),
    "cut": (lambda path: damage(write(path, 1), lambda data: data[:-5]), "cannot be used"),
    "a folder": (lambda path: path.mkdir(), "cannot be used"),
    "a pipe": (os.mkfifo, "cannot be used"),
    "of a weight file": (
        lambda path: path.write_bytes(header(__metadata__={})),
        "its rank and scale are missing",
    ),
    "without arrays": (
        lambda path: path.write_bytes(header(__metadata__=ABOUT)),
        "it does not contain arrays",
    ),
    "of no rank": (
        lambda path: damage(write(path, 1), lambda data: data.replace(b'\\"rank\\": 2', b'\\"rank\\": 0')),
        "its rank and scale are missing",
    ),
    "of another rank": (
        lambda path: damage(write(path, 1), lambda data: data.replace(b'\\"rank\\": 2', b'\\"rank\\": 3')),
        "lora_A.weight' has the shape (2, 40), but must have (3, 40)",
    ),
    "of more layers": (lambda path: write(path, 1, config=OTHER), "another model: it adapts 'layers.2."),
    "of another width": (
        lambda path: write(path, 1, config=WIDE),
        "'layers.0.down.lora_A.weight' has the shape (2, 48), but must have (2, 40)",
    ),
    "of other weights": (lambda path: write(path, 1, base=7), "the adapted weights differ"),
    "not a number": (lambda path: numbers(write(path, 1), np.nan), "it contains NaN or infinity"),
    "too large": (lambda path: numbers(write(path, 1), 3e38), "overflows"),
    "long": (lambda path: write(path, 1, rank=2000), "it is larger than the model"),
}


async def test_files_other_than_adapters_of_the_model(tmp_path: Path, texts: Any) -> None:
    write(tmp_path / "one", 1)
    async with admin(tmp_path) as (send, adapters):
        device = device_of(adapters)
        assert (await send("POST", {"adapter": "one"}))[0] == 200
        memory = (await device.statistics()).memory.used
        for name, (make, says) in BAD.items():
            make(tmp_path / name)
            status, code, message = error_of(await send("POST", {"adapter": name}))
            assert (status, code) == (400, "unusable_adapter"), name
            assert message.startswith(f"the adapter {name} cannot be used: "), message
            assert says in message
            # It does not reveal the place of the folder.
            assert str(tmp_path) not in message
        status, code, message = error_of(await send("POST", {"adapter": "none"}))
        assert (status, code) == (404, "adapter_not_found")
        assert message == "there is no adapter 'none' in the folder of adapters"
        # Nothing has changed.
        assert adapters.state()["in_use"] == [{"adapter": "one", "streams": 0}]
        assert await ask(adapters.generation, 0) == texts["one"][0]
        await settled(device, memory)


async def test_names_that_lead_out_of_the_folder(folder: Path) -> None:
    outside = write(folder.parent / "outside", 1)
    inside = folder / "deeper"
    inside.mkdir(exist_ok=True)
    write(inside / "one", 1)
    async with admin(folder) as (send, adapters):
        names = (
            str(outside), "../outside", "deeper/one", "./one", "..", ".", "", "a\\b", "x" * 300, "one\x00",
            "one\n", 5, ["one"], {"a": "one"}, True,
        )  # fmt: skip
        for name in names:
            status, _, message = error_of(await send("POST", {"adapter": name}))
            assert status == 400, name
            assert message.startswith("adapter must be the name of a file"), name
        for body in (b"", b"one", b"[1]", b"{", b'{"adapter": null}', b"{}", b"\xff"):
            assert error_of(await send("POST", body))[0] == 400
        assert adapters.state()["adapter"] is None


async def test_two_swaps_at_once_and_clients_that_leave(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    going, reading = trio.Event(), trio.Event()

    async def slow(*given: Any) -> Any:
        reading.set()
        await going.wait()
        return await read_adapter(*given)

    monkeypatch.setattr("adapters.read_adapter", slow)
    async with admin(folder) as (send, adapters):
        answers = list[Any]()

        async def swap() -> None:
            answers.append(await send("POST", {"adapter": "one"}))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(swap)
            await reading.wait()
            for method in ("POST", "DELETE"):
                assert error_of(await send(method, {"adapter": "two"}))[:2] == (409, "swap_under_way")
            # The client leaves: nothing has changed, and another swap may begin.
            nursery.cancel_scope.cancel()
        assert not answers
        assert adapters.state()["in_use"] == [{"adapter": None, "streams": 0}]
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swap)
            going.set()
        assert answers[0][0] == 200
        assert (await send("GET"))[1]["adapter"] == "one"


async def test_a_swap_while_the_service_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with admin(folder) as (send, adapters):
        device = device_of(adapters)
        memory = (await device.statistics()).memory.used

        async def late(*given: Any) -> Any:
            found = await read_adapter(*given)
            adapters.is_ending = True
            return found

        monkeypatch.setattr("adapters.read_adapter", late)
        for method in ("POST", "POST", "DELETE"):
            assert error_of(await send(method, {"adapter": "one"}))[:2] == (503, "ending")
            assert adapters.state()["in_use"] == [{"adapter": None, "streams": 0}]
        await settled(device, memory)


async def test_a_swap_while_faults_are_counted(folder: Path) -> None:
    async with admin(folder, path=folder / "one", has_faults=True) as (send, _):
        assert error_of(await send("DELETE"))[:2] == (409, "faults")
        assert (await send("GET"))[1]["adapter"] == "one"


async def test_a_device_without_memory_for_a_second_set(folder: Path) -> None:
    """Arrays of processors are in shared memory, so a full file system of it is also this error."""
    async with admin(folder, exact=0) as (send, adapters):
        used = (await device_of(adapters).statistics()).memory.used
        text = await ask(adapters.generation, 0)
    options = ta.DeviceOptions(isolation="inline", memory_limit=used + 20_000)
    async with admin(folder, exact=0, options=options) as (send, adapters):
        status, code, message = error_of(await send("POST", {"adapter": "one"}))
        assert (status, code) == (503, "out_of_memory")
        assert message.startswith("the device lacks memory for a second set of weights")
        assert adapters.state()["in_use"] == [{"adapter": None, "streams": 0}]
        await settled(device_of(adapters), used)
        assert await ask(adapters.generation, 0) == text


async def test_a_first_adapter_that_cannot_be(system: ta.System, device: ta.Device, tmp_path: Path) -> None:
    from text import InputError

    (tmp_path / "bad").write_text("no adapter")
    async with opened(system, device) as made:
        for name, says in (("bad", "the adapter bad cannot be used"), ("none", "there is no adapter 'none'")):
            with pytest.RaisesGroup(pytest.RaisesExc(InputError, match=says)):
                async with open_adapters(made, path=tmp_path / name):
                    pass


async def test_merged_adapters_match_pytorch(system: ta.System, device: ta.Device, folder: Path) -> None:
    torch: Any = pytest.importorskip("torch", reason="PyTorch is not installed")
    path = folder / "two"
    found = await read_adapter(device, path, TINY, LOADED.weights)
    name = "1.down"
    whole = found.added(name, LOADED.weights[name])
    layer = torch.nn.Linear(*reversed(LOADED.weights[name].shape), bias=False)
    layer.weight.data.copy_(torch.from_numpy(LOADED.weights[name]))
    model = torch.nn.ModuleDict({"layers": torch.nn.ModuleDict({"1": torch.nn.ModuleDict({"down": layer})})})
    train.Lora(["layers.1.down"], rank=3, alpha=6.0).add(model)
    for part, array in zip(("A", "B"), found.arrays[name], strict=True):
        getattr(layer, f"lora_{part}").weight.data.copy_(torch.from_numpy(array))
    x = np.random.default_rng(5).standard_normal((3, 40)).astype(np.float32)
    with torch.no_grad():
        np.testing.assert_allclose(layer(torch.from_numpy(x)).numpy(), x @ whole.T, atol=1e-5)
