"""Pages: attention through tables, eviction of the oldest, losses and cancellation midway, and bad input."""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import pytest
import trio
from cancel_at import cancelled_at_each_step

import trio_accel as ta
from trio_accel.patterns import Pages, PagesFullError, PageTable
from trio_accel.telemetry import record
from trio_accel.testing import inject_fault

SIZE = 4
COUNT = 8
Work: TypeAlias = Callable[[PageTable], Awaitable[None]]
SURVIVES = ta.DeviceOptions(
    isolation="process", retry=1, intensity=ta.Intensity(1000, 60.0), backoff=ta.Backoff(base=0.0)
)


def row(place: int, token: int) -> npt.NDArray[np.float64]:
    return np.array([token + 0.5, place, token * place])


@pytest.fixture
async def arrays(device: ta.Device) -> list[ta.AccelRef]:
    """Two layers, of which the second has other numbers."""
    return [await device.zeros((COUNT, SIZE, 3)), await device.zeros((COUNT, SIZE, 3), "float32")]


async def append(arrays: list[ta.AccelRef], table: PageTable, tokens: list[int]) -> None:
    """A step: space, numbers after the existing ones, and a report of both."""
    await table.reserve(table.length + len(tokens))
    for place, token in enumerate(tokens, table.length):
        for layer, array in enumerate(arrays):
            numbers = (row(place, token) + layer).astype(array.dtype.dtype)
            await array[table.pages[place // SIZE], place % SIZE].assign(numbers)
    table.wrote(tokens)


async def check(arrays: list[ta.AccelRef], table: PageTable, tokens: list[int]) -> None:
    """The table has these tokens; the arrays are whole."""
    assert table.length == len(tokens)
    expected = np.array([row(*each) for each in enumerate(tokens)]).reshape(-1, 3)
    for layer, array in enumerate(arrays):
        rows = (await array.to_host())[list(table.pages)].reshape(-1, 3)[: len(tokens)]
        np.testing.assert_array_equal(rows, expected + layer)


async def test_attention_through_shared_and_forked_tables(device: ta.Device) -> None:
    heads, kv_heads, width = 4, 2, 8
    generator = np.random.default_rng(7)
    # The model's value for a token, here of it and its position only.
    keys, values = generator.normal(size=(2, 40, 20, kv_heads, width))
    key_cache, value_cache = [await device.zeros((COUNT, kv_heads, SIZE, width)) for _ in range(2)]
    pages = Pages([key_cache, value_cache], SIZE)

    async def step(table: PageTable, tokens: list[int]) -> None:
        await table.reserve(table.length + len(tokens))
        for place, token in enumerate(tokens, table.length):
            page, slot = table.pages[place // SIZE], place % SIZE
            await key_cache[page, :, slot].assign(keys[token, place])
            await value_cache[page, :, slot].assign(values[token, place])
        table.wrote(tokens)

    first = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]
    one = pages.open(first)
    await step(one, first)
    second = [*first[:8], 7, 7]
    two = pages.open(second)
    assert (two.length, two.pages) == (8, one.pages[:2])
    await step(two, second[8:])
    fork = one.fork()
    await step(fork, [11, 12, 13])
    await step(one, [21])
    assert fork.pages[:2] == one.pages[:2] == two.pages[:2]
    assert len({fork.pages[2], one.pages[2], two.pages[2]}) == 3
    sequences = {one: [*first, 21], two: second, fork: [*first, 11, 12, 13]}

    tables = np.zeros((3, 4), np.int64)
    for number, table in enumerate(sequences):
        tables[number, : len(table.pages)] = table.pages
    lengths = np.array([table.length for table in sequences])
    query = generator.normal(size=(3, heads, 2, width))
    made = await ta.nn.paged_attention(await device.put(query), key_cache, value_cache, tables, lengths)

    expected = np.empty_like(query)
    for number, tokens in enumerate(sequences.values()):
        at = tokens, range(len(tokens))
        for head in range(heads):
            key, value = (whole[at][:, head * kv_heads // heads] for whole in (keys, values))
            for last in range(2):
                seen = len(tokens) - 1 + last
                scores = key[:seen] @ query[number, head, last] / math.sqrt(width)
                weights = np.exp(scores - scores.max())
                expected[number, head, last] = weights @ value[:seen] / weights.sum()
    np.testing.assert_allclose(await made.to_host(), expected, rtol=1e-10, atol=1e-12)


async def test_at_least_one_token_is_left_to_compute(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE)
    tokens = list(range(8))
    await append(arrays, pages.open(), tokens)
    assert [pages.open(tokens[:given]).length for given in (0, 3, 4, 5, 8)] == [0, 0, 0, 4, 4]
    assert pages.open([*tokens, 0]).length == 8
    assert pages.open([1, *tokens[1:], 0]).length == 0
    assert pages.open([*tokens[:4], 9, *tokens[5:], 0]).length == 4
    assert pages.statistics().shared_tokens == 20


async def test_equal_pages_become_one(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE)
    tokens = [1, 2, 3, 4, 5]
    one, two = pages.open(tokens), pages.open(tokens)
    for table in (one, two):
        await append(arrays, table, tokens)
    assert one.pages[0] == two.pages[0]
    assert one.pages[1] != two.pages[1]
    assert pages.used == 3
    for table in (one, two):
        await check(arrays, table, tokens)


async def test_pages_are_not_shared_without_leave(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE, share=False)
    tokens = [1, 2, 3, 4, 5]
    one = pages.open(tokens)
    await append(arrays, one, tokens)
    two = pages.open(tokens)
    assert two.length == 0
    await append(arrays, two, tokens)
    assert not set(one.pages) & set(two.pages)
    one.close()
    assert pages.statistics().cached == 0


async def test_pages_are_shared_only_within_a_tenant(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE)
    tokens = list(range(10))
    one = pages.open(tokens, tenant="a")
    await append(arrays, one, tokens)
    assert pages.demand(tokens, tenant="b") == pages.demand(tokens) == 3
    # A tenant may be called as a serial is.
    for tenant in ("b", None, 0, 1):
        with pages.open(tokens, tenant=tenant) as two:
            assert two.length == 0
    two = pages.open(tokens, tenant="b")
    await append(arrays, two, tokens)
    assert not set(one.pages) & set(two.pages)
    for table, tenant in ((one, "a"), (two, "b")):
        assert pages.demand(tokens, tenant=tenant) == 1
        with pages.open(tokens, tenant=tenant) as again, again.fork() as fork:
            assert again.pages == fork.pages == table.pages[:2]
            assert (table.exclusive_pages, again.exclusive_pages) == (1, 0)
        await check(arrays, table, tokens)


async def test_a_returning_table_shares_with_its_own_tenant(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE, host=COUNT)
    tables = {tenant: pages.open(TEXT, tenant=tenant) for tenant in "ab"}
    for table in tables.values():
        await append(arrays, table, TEXT)
    await tables["a"].spill()
    with pages.open() as others:
        await others.reserve(5 * SIZE)
    await tables["a"].restore()
    assert not set(tables["a"].pages) & set(tables["b"].pages)
    for table in tables.values():
        await check(arrays, table, TEXT)


async def test_the_least_recently_used_is_dropped_first(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE)
    texts = {name: [number] * 9 for number, name in enumerate("abc")}
    for text in texts.values():
        with pages.open(text) as table:
            await append(arrays, table, text[:8])
    assert (pages.used, pages.free, pages.statistics().cached) == (0, 8, 6)
    pages.open(texts["a"]).close()
    # Two never had anything, and one is evicted: the end of b, the oldest now.
    table = pages.open()
    await table.reserve(3 * SIZE)
    known = {}
    for name, text in texts.items():
        with pages.open(text) as again:
            known[name] = again.length
    assert known == {"a": 8, "b": 4, "c": 8}
    await table.reserve(6 * SIZE)
    with pages.open(texts["c"]) as again:
        assert again.length == 8
    assert pages.open(texts["a"]).length == pages.open(texts["b"]).length == 0
    assert pages.statistics().evicted == 4


async def test_a_forked_table_may_not_write_unreserved(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE)
    table = pages.open()
    await append(arrays, table, [1, 2])
    await table.reserve(4)
    assert table.room == 4
    fork = table.fork()
    assert table.room == fork.room == 2
    for each in (table, fork):
        with pytest.raises(ValueError, match="call reserve before each step"):
            each.wrote([3])
    await table.reserve(3)
    assert (table.room, fork.room) == (4, 4)
    table.wrote([3])
    fork.wrote([4])
    assert (table.length, fork.length) == (3, 3)


async def test_no_room_changes_nothing(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE, host=3)
    one, two = pages.open(), pages.open()
    await append(arrays, one, list(range(10)))
    with pytest.raises(PagesFullError, match="pages on the device: 6 requested, and 5 free") as caught:
        await two.reserve(6 * SIZE)
    assert (caught.value.requested, caught.value.free) == (6, 5)
    assert isinstance(caught.value, ta.NotExecutedError)
    await one.spill()
    assert (pages.used, one.pages, one.length, one.is_spilled) == (0, (), 10, True)
    await two.reserve(8 * SIZE)
    with pytest.raises(PagesFullError):
        await one.restore()
    with pytest.raises(PagesFullError):
        await one.reserve(11)
    two.wrote(range(100, 104))
    with pytest.raises(PagesFullError, match="pages in host memory: 1 requested, and 0 free"):
        await two.spill()
    assert (one.is_spilled, two.is_spilled, pages.statistics().spilled) == (True, False, 3)
    two.close()
    await one.reserve(11)
    await check(arrays, one, list(range(10)))
    one.close()
    assert (pages.used, pages.statistics().spilled) == (0, 0)


@pytest.mark.parametrize("number", [0, 1])
async def test_a_spill_into_full_pinned_memory_changes_nothing(
    arrays: list[ta.AccelRef], monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    pages, device, made = Pages(arrays, SIZE, host=COUNT), arrays[0].device, 0
    table = pages.open()
    await append(arrays, table, list(range(5)))
    host_empty = type(device).host_empty

    def full(self: ta.Device, *given: Any) -> Any:
        nonlocal made
        made += 1
        if made > number:
            raise MemoryError
        return host_empty(self, *given)

    with monkeypatch.context() as patched:
        patched.setattr(type(device), "host_empty", full)
        with pytest.raises(PagesFullError, match="pages in host memory: 2 requested, and 0 free"):
            await table.spill()
    before = pages.statistics()
    assert (table.is_spilled, len(table.pages), before.spilled) == (False, 2, 0)
    await table.spill()
    assert (pages.used, table.is_spilled, pages.statistics().spilled) == (0, True, 2)
    await table.restore()
    await check(arrays, table, list(range(5)))


async def test_a_spilled_table_is_closed(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE, host=COUNT)
    with pages.open() as table:
        await append(arrays, table, [1, 2])
        await table.spill()
        await table.spill()
        assert pages.statistics().spilled == 1
        with pytest.raises(ValueError, match="spilled"):
            table.fork()
        with pytest.raises(ValueError, match="room up to 2"):
            table.wrote([1])
    assert (pages.statistics().spilled, table.is_spilled) == (0, False)


# Actions on a table of ten tokens with another user of its last page, and the operation to hit.
MIDWAY: dict[str, tuple[Work, str]] = {
    "copy": (lambda table: table.reserve(12), "devices.Assign"),
    "restore": (lambda table: table.restore(), "devices.Assign"),
    "spill": (lambda table: table.spill(), "devices.ToHost"),
}
TEXT = list(range(10, 20))


@asynccontextmanager
async def midway(
    arrays: list[ta.AccelRef], name: str
) -> AsyncGenerator[tuple[Pages, PageTable, PageTable], None]:
    pages = Pages(arrays, SIZE, host=COUNT)
    with pages.open() as table:
        await append(arrays, table, TEXT)
        with table.fork() as other:
            if name == "restore":
                await table.spill()
            yield pages, table, other
    assert (pages.used, pages.statistics().spilled) == (0, 0)
    with pages.open() as all_of_it:
        await all_of_it.reserve(COUNT * SIZE)
        assert sorted(all_of_it.pages) == list(range(COUNT))


@pytest.mark.parametrize("name", MIDWAY)
async def test_cancelled_at_each_step(arrays: list[ta.AccelRef], name: str) -> None:
    work, _ = MIDWAY[name]
    outcomes = set[bool]()
    async with midway(arrays, name) as (pages, table, other):

        async def attempt() -> None:
            with table.fork() if name == "copy" else pages.open() as third:
                await work(third if name == "copy" else table)
                outcomes.add(True)
                # Undone for the next attempt.
                if name == "restore":
                    await table.spill()
                elif name == "spill":
                    await table.restore()

        async for was_cancelled in cancelled_at_each_step(attempt):
            outcomes.add(not was_cancelled)
            await check(arrays, other, TEXT)
            if name == "restore" and not table.is_spilled:
                await table.spill()
            elif name == "spill":
                await table.restore()
        await table.restore()
        await check(arrays, table, TEXT)
    assert outcomes == {True, False}


@pytest.mark.parametrize("way", ["closed", "reserved"])
@pytest.mark.parametrize("name", MIDWAY)
async def test_a_table_changes_while_it_is_copied(
    device: ta.Device, arrays: list[ta.AccelRef], name: str, way: str
) -> None:
    work, operation = MIDWAY[name]
    raised: list[Exception] = []

    async def run(work: Work, table: PageTable) -> None:
        try:
            await work(table)
        except (trio.BusyResourceError, trio.ClosedResourceError) as error:
            raised.append(error)

    async with midway(arrays, name) as (pages, table, other):
        fault = inject_fault(device, operation, delay=0.5)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(run, work, table)
            while not fault.hit:  # noqa: ASYNC110  # nobody tells of it
                await trio.sleep(0.001)
            if way == "closed":
                table.close()
            else:
                nursery.start_soon(run, MIDWAY["copy"][0], table)
        assert len(raised) == 1
        assert isinstance(raised[0], trio.ClosedResourceError if way == "closed" else trio.BusyResourceError)
        await check(arrays, other, TEXT)
        if way == "reserved":
            # The first to finish has its way.
            await table.restore()
            await check(arrays, table, TEXT)
            assert len(table.pages) == 3
        assert pages.used == len(set(table.pages) | set(other.pages))


@pytest.mark.parametrize("name", ["copy", "spill"])
async def test_pages_written_meanwhile_are_kept(
    device: ta.Device, arrays: list[ta.AccelRef], name: str
) -> None:
    work, operation = MIDWAY[name]
    async with midway(arrays, name) as (pages, table, other):
        await table.reserve(11)
        # The page has a single user again.
        third = table.fork() if name == "copy" else pages.open()
        number = arrays[0][table.pages[2], 2]
        fault = inject_fault(device, operation, delay=0.5)
        raised: list[trio.BusyResourceError] = []

        async def run() -> None:
            try:
                await work(table)
            except trio.BusyResourceError as error:
                raised.append(error)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(run)
            while not fault.hit:  # noqa: ASYNC110  # nobody tells of it
                await trio.sleep(0.001)
            third.close()
            table.wrote([7])
        assert len(raised) == 1
        assert (table.length, table.is_spilled) == (11, False)
        for layer, array in enumerate(arrays):
            place = array[table.pages[2], 2]
            await place.assign((row(10, 7) + layer).astype(array.dtype.dtype))
        np.testing.assert_array_equal(await number.to_host(), row(10, 7))
        await check(arrays, table, [*TEXT, 7])
        await check(arrays, other, TEXT)


async def test_restored_pages_are_found(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE, host=COUNT)
    with pages.open() as table:
        await append(arrays, table, TEXT)
        await table.spill()
        with pages.open() as all_of_it:
            await all_of_it.reserve(COUNT * SIZE)
        with pages.open(TEXT) as again:
            assert again.length == 0
        await table.restore()
        with pages.open(TEXT) as again:
            assert (again.length, again.pages) == (8, table.pages[:2])
            # Known pages are not copied again.
            await table.spill()
            await table.restore()
            assert table.pages[:2] == again.pages
            await check(arrays, table, TEXT)


async def test_spills_at_once_keep_the_bound(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE, host=4)
    tables = [pages.open() for _ in range(2)]
    refused: list[PagesFullError] = []
    for number, table in enumerate(tables):
        await append(arrays, table, [number, *TEXT])

    async def spill(table: PageTable) -> None:
        try:
            await table.spill()
        except PagesFullError as error:
            refused.append(error)

    async with trio.open_nursery() as nursery:
        for table in tables:
            nursery.start_soon(spill, table)
    assert [(error.requested, error.free) for error in refused] == [(3, 1)]
    assert sorted(table.is_spilled for table in tables) == [False, True]
    assert pages.statistics().spilled == 3


async def test_several_tables_heal_at_once(device: ta.Device, arrays: list[ta.AccelRef]) -> None:
    async with midway(arrays, "copy") as (pages, table, other):
        inject_fault(device, "devices.Assign", delay=0.2)
        with trio.move_on_after(0.05) as scope:
            await table.reserve(12)
        assert scope.cancelled_caught
        assert (pages.used, table.length) == (3, 10)
        tables = [pages.open() for _ in range(2)]
        async with trio.open_nursery() as nursery:
            for each in tables:
                nursery.start_soon(each.reserve, 2 * SIZE)
        assert len({*tables[0].pages, *tables[1].pages, *other.pages}) == 7
        for each in tables:
            each.close()


@pytest.fixture
async def survivor(system: ta.System) -> AsyncGenerator[ta.Device, None]:
    async with system.open_device("cpu", options=SURVIVES) as device:
        yield device


@pytest.mark.parametrize("fault", ["kill", "poison"])
@pytest.mark.parametrize("name", MIDWAY)
async def test_a_loss_midway(survivor: ta.Device, name: str, fault: str) -> None:
    work, operation = MIDWAY[name]
    arrays = [await survivor.zeros((COUNT, SIZE, 3)) for _ in range(2)]
    async with midway(arrays, name) as (_, table, other):
        # The first layer is there already.
        planned = [
            inject_fault(survivor, operation, delay=0.0),
            inject_fault(survivor, operation, kill=fault == "kill", poison=fault == "poison"),
        ]
        before = table.pages, table.is_spilled
        try:
            await work(table)
        except ta.ContextLostError:
            assert (table.pages, table.is_spilled) == before
            await work(table)
        assert [each.hit for each in planned] == [1, 1]
        assert survivor.generation == 2
        assert table.is_spilled == (name == "spill")
        # The arrays can be read as a whole again.
        await check(arrays, other, TEXT)
        await table.restore()
        await check(arrays, table, TEXT)
        await append(arrays, table, [7])
        await check(arrays, table, [*TEXT, 7])
        await check(arrays, other, TEXT)


@pytest.mark.parametrize("name", ["restore", "spill"])  # the error of a copy is raised, and healed; see below
async def test_a_loss_midway_is_not_seen(survivor: ta.Device, name: str) -> None:
    work, operation = MIDWAY[name]
    arrays = [await survivor.zeros((COUNT, SIZE, 3)) for _ in range(2)]
    async with midway(arrays, name) as (_, table, other):
        inject_fault(survivor, operation, kill=True)
        await work(table)
        assert survivor.generation == 2
        await check(arrays, other, TEXT)
        await table.restore()
        await check(arrays, table, TEXT)


async def test_any_table_heals_pages_invalidated_by_a_loss(system: ta.System) -> None:
    options = ta.DeviceOptions(isolation="process", backoff=ta.Backoff(base=0.0))
    async with system.open_device("cpu", options=options) as device:
        arrays = [await device.zeros((COUNT, SIZE, 3)) for _ in range(2)]
        async with midway(arrays, "copy") as (pages, table, other):
            inject_fault(device, "devices.Assign", kill=True)
            with pytest.raises(ta.ContextLostError):
                await table.reserve(12)
            assert pages.free == COUNT - 3
            with pytest.raises(ta.StaleRefError):
                await arrays[0].to_host()
            with pages.open() as third:
                await third.reserve(0)
            await check(arrays, other, TEXT)
            await check(arrays, table, TEXT)


async def test_a_lost_step_is_written_again(survivor: ta.Device) -> None:
    arrays = [await survivor.zeros((COUNT, SIZE, 3))]
    pages = Pages(arrays, SIZE)
    with pages.open() as table, pages.open() as other:
        await append(arrays, other, [5, 6])
        await append(arrays, table, [1])
        inject_fault(survivor, "devices.Assign", kill=True)
        try:
            await append(arrays, table, [2])
        except ta.ContextLostError:
            assert table.length == 1
            await append(arrays, table, [2])
        await check(arrays, table, [1, 2])
        await check(arrays, other, [5, 6])


async def test_figures(system: ta.System, arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE, host=2)

    class Shows(ta.Actor):
        @asynccontextmanager
        async def lifespan(self, context: ta.ActorContext) -> AsyncGenerator[None, None]:
            context.show_readings(pages.readings)
            yield

    await system.spawn(Shows, name="cache")
    table = pages.open()
    await append(arrays, table, list(range(6)))
    pages.open(range(6)).fork()
    with record(system) as recorder:
        readings = {each.name: each for each in recorder.snapshot().readings if each.path.endswith("cache")}
    values = {name: each.value for name, each in readings.items()}
    assert values["pages_used"] == pages.used == 2
    assert (values["pages_limit"], values["pages_free"], values["pages_shared_tokens"]) == (8, 6, 4)
    assert {name for name, each in readings.items() if each.kind == "counter"} == {
        "pages_shared_tokens",
        "pages_copied",
        "pages_evicted",
    }


# The types of these calls are wrong, and are looked at when they run.
Make: TypeAlias = Callable[[Any, Any], object]
CACHE: Any = Pages
MADE: list[tuple[Make, type[Exception], str]] = [
    (lambda x, _: CACHE([]), ValueError, "one or more"),
    (lambda x, _: CACHE([x, x[1:]]), ValueError, "equally many pages"),
    (lambda x, y: CACHE([x, y]), ValueError, "of one device"),
    (lambda x, _: CACHE(x[0, 0]), ValueError, "two or more axes"),
    (lambda x, _: CACHE(x[:0]), ValueError, "two or more axes"),
    (lambda x, _: CACHE(np.zeros((3, 3))), TypeError, "arrays of a device"),
    (lambda x, _: CACHE([x, None]), TypeError, "arrays of a device"),
    (lambda x, _: CACHE(5), TypeError, "arrays of a device"),
    (lambda x, _: CACHE(x, 0), ValueError, "size must be at least 1"),
    (lambda x, _: CACHE(x, 1.5), TypeError, "size must be an integer"),
    (lambda x, _: CACHE(x, host=-1), ValueError, "host must be at least 0"),
    (lambda x, _: CACHE(x, hosts=1), TypeError, "hosts"),
    (lambda x, _: CACHE(x).open([1, -1]), ValueError, "at least 0, got -1"),
    (lambda x, _: CACHE(x).open([0.5]), TypeError, "integer"),
    (lambda x, _: CACHE(x).open("ab"), TypeError, "integer"),
    (lambda x, _: CACHE(x).open(tenant=[]), TypeError, "unhashable"),
    (lambda x, _: CACHE(x).open().wrote([1]), ValueError, "room up to 0"),
]


@pytest.mark.parametrize(("make", "error", "text"), MADE)
async def test_an_invalid_cache(
    system: ta.System,
    device: ta.Device,
    arrays: list[ta.AccelRef],
    make: Make,
    error: type[Exception],
    text: str,
) -> None:
    async with system.open_device("cpu") as other:
        with pytest.raises(error, match=text):
            make(arrays[0], await other.zeros((COUNT, SIZE, 3)))


async def test_a_table_refuses_invalid_arguments(arrays: list[ta.AccelRef]) -> None:
    pages = Pages(arrays, SIZE)
    table = pages.open()
    await append(arrays, table, [1, 2, 3])
    with pytest.raises(ValueError, match="length must be at least 3 and at most 32, got 2"):
        await table.reserve(2)
    with pytest.raises(ValueError, match="at most 32, got 33"):
        await table.reserve(33)
    with pytest.raises(TypeError, match="integer"):
        await table.reserve(4.0)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(PagesFullError, match="in host memory: 1 requested, and 0 free"):
        await table.spill()
    with pytest.raises(ValueError, match="-5"):
        table.wrote([4, -5])
    assert (table.length, table.room, pages.used) == (3, 4, 1)
    table.close()
    calls: list[Callable[[], Awaitable[None]]] = [lambda: table.reserve(4), table.spill, table.restore]
    for call in calls:
        with pytest.raises(trio.ClosedResourceError, match="closed"):
            await call()
    with pytest.raises(trio.ClosedResourceError, match="closed"):
        table.fork()
    with pytest.raises(trio.ClosedResourceError, match="closed"):
        table.wrote([4])
    assert (pages.used, table.pages) == (0, ())
