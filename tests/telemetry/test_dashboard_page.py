"""The page of the dashboard in a browser: Chromium, where it is installed."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import attrs
import numpy as np
import pytest
import trio
from playwright.sync_api import Page, sync_playwright
from telemetry.read_snapshot import always

import trio_accel as ta
from trio_accel.devices import ProgramCost, RecoveryCost
from trio_accel.telemetry import DeviceRow, open_dashboard

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed"),
    pytest.mark.timeout(120),
]
WAIT = 30_000
T = TypeVar("T")


@attrs.frozen
class Fail(ta.Message["Worker"]):
    text: str


class Worker(ta.Actor):
    @ta.handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise LookupError(message.text)


@attrs.frozen
class PassOn(ta.Message["Parent"]):
    message: Fail


class Parent(Worker):
    @asynccontextmanager
    async def lifespan(self, context: ta.ActorContext) -> AsyncGenerator[None]:
        self.child = await context.spawn(Worker, name="worker")
        yield

    @ta.handles(PassOn)
    async def pass_on(self, message: PassOn) -> None:
        await self.child.tell(message.message)


def browse(url: str, visit: Callable[[Page], T], **options: Any) -> T:
    """Visit the page in a browser of its own; complaints of the page fail the test."""
    complaints: list[str] = []
    asked: list[str] = []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = browser.new_page(**options)
            page.set_default_timeout(WAIT)
            page.on("console", lambda message: complaints.append(message.text))
            page.on("pageerror", lambda error: complaints.append(str(error)))
            page.on(
                "request",
                lambda request: complaints.extend([] if request.url.startswith(url) else [request.url]),
            )
            page.goto(url)
            page.wait_for_selector("#link[data-state=live]")
            found = visit(page)
        finally:
            browser.close()
    assert complaints == []
    assert [one for one in asked if not one.startswith((url, "data:"))] == []
    return found


async def test_a_restart_is_seen_within_a_second(system: ta.System) -> None:
    worker = await system.spawn(Worker, name="worker")
    text = "<img src=x onerror=alert(1)> broke"

    def visit(page: Page) -> float:
        row = page.locator("#tree tr", has=page.locator("td[title='test/worker']"))
        row.wait_for()
        assert "running" in row.inner_text()
        assert row.locator("td").last.inner_text() == "0"
        page.evaluate("window.began = performance.now()")
        trio.from_thread.run(worker.tell, Fail(text))
        page.locator("td[title='test/worker'] ~ td.warn").wait_for()
        took = float(page.evaluate("performance.now() - window.began")) / 1000
        page.locator("#failures summary").first.click()
        assert text in page.locator("#failures pre").first.inner_text()
        assert page.locator("#failures img").count() == 0
        return took

    async with open_dashboard(system, errors=True) as dashboard:
        assert await trio.to_thread.run_sync(browse, dashboard.url, visit) < 1.0


async def test_the_first_paint_shows_the_state(system: ta.System) -> None:
    """Before an event has come."""
    await system.spawn(Worker, name="worker")

    def look(url: str) -> list[str]:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
            try:
                page = browser.new_page()
                page.route("**/events", lambda route: None)
                page.goto(url)
                return [page.inner_text(part) for part in ("#system", "#totals", "#devices", "#tree tbody")]
            finally:
                browser.close()

    async with open_dashboard(system) as dashboard, system.open_device("cpu"):
        name, totals, devices, tree = await trio.to_thread.run_sync(look, dashboard.url)
    assert name == "test"
    assert "messages per second" in totals
    assert "cpu" in devices
    assert "worker" in tree


async def test_a_restarting_device_and_a_serving_device(system: ta.System) -> None:
    """Numbers that can fall to 0 show their start; a missing process is reported."""
    row = DeviceRow(
        path="test/gpu", name="gpu", backend="cpu", isolation="process", state="restarting", generation=2
    )
    other = attrs.evolve(row, path="test/b", state="running", pid=7, served=61.0, completed=12)
    inline = attrs.evolve(other, path="test/c", isolation="inline", pid=None)

    def visit(page: Page) -> list[str]:
        page.wait_for_selector(".device")
        return [page.inner_text(f".device:nth-child({place}) dl") for place in (1, 2, 3)]

    async with open_dashboard(system) as dashboard:
        shown = attrs.evolve(dashboard.recorder.snapshot(), devices=(row, other, inline))
        vars(dashboard.recorder)["snapshot"] = always(shown)
        texts = [" ".join(one.split()) for one in await trio.to_thread.run_sync(browse, dashboard.url, visit)]
    assert "served by no process now" in texts[0]
    assert "completed 0 in generation 2" in texts[0]
    assert "served by process 7" in texts[1]
    assert "completed 12 in 1 min 1 s" in texts[1]
    assert f"served by process {os.getpid()}, inline" in texts[2]


@pytest.mark.parametrize("width", [400, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
async def test_it_fits_and_follows_the_colour_scheme(system: ta.System, width: int, scheme: str) -> None:
    for number in range(3):
        await system.spawn(Worker, name=f"a-worker-with-quite-a-long-name-{number}")

    def visit(page: Page) -> tuple[int, int]:
        page.locator("td[title='test/a-worker-with-quite-a-long-name-2']").wait_for()
        colour = str(page.evaluate("getComputedStyle(document.body).backgroundColor"))
        red = int(colour.removeprefix("rgb(").split(",")[0])
        return int(page.evaluate("document.scrollingElement.scrollWidth")), red

    async with open_dashboard(system) as dashboard, system.open_device("cpu"):
        options = {"viewport": {"width": width, "height": 800}, "color_scheme": scheme}
        found, red = await trio.to_thread.run_sync(lambda: browse(dashboard.url, visit, **options))
    assert found <= width
    assert red > 200 if scheme == "light" else red < 60


async def test_times_of_the_next_recovery(system: ta.System) -> None:
    async with open_dashboard(system) as dashboard, system.open_device("cpu") as device:
        cost = str(device.recovery)
        module = ProgramCost(
            program="encoder-1",
            module="encoder",
            imports=1.23,
            makes=0.31,
            preloading="refused",
            reason="<b>",
        )
        told = RecoveryCost(context=0.31, programs=(module,), spares=1)
        (own,) = dashboard.recorder.snapshot().devices
        slow = attrs.evolve(own, path="test/slow", recovery_text=str(told), recovery_cost=told.seconds)
        unknown = attrs.evolve(own, path="test/unknown", recovery_text=None, recovery_cost=None)

        def visit(page: Page) -> list[str]:
            page.wait_for_selector(".device:nth-child(3)")
            assert page.locator(".device b").count() == 0
            term = "dt:text-is('next recovery') + dd"
            return [page.inner_text(f".device:nth-child({place}) {term}") for place in (1, 2, 3)]

        shown = attrs.evolve(dashboard.recorder.snapshot(), devices=(own, slow, unknown))
        vars(dashboard.recorder)["snapshot"] = always(shown)
        found = await trio.to_thread.run_sync(browse, dashboard.url, visit)
    assert cost.startswith("first start 0.")
    slowly = (
        "1.85 s, which a spare has done: worker and context 0.31 s, import of encoder 1.23 s, "
        "constructor of encoder-1 0.31 s; module encoder is imported in each worker, because <b>"
    )
    assert found == [f"not measured yet; {cost}", slowly, "\N{EN DASH}"]


async def test_who_holds_the_memory_of_a_device(system: ta.System) -> None:
    async with open_dashboard(system) as dashboard, system.open_device("cpu") as device:
        kept = await device.put(np.ones(1024))

        def visit(page: Page) -> str:
            held = page.locator(".held div")
            held.wait_for()
            return str(held.inner_text())

        shown = await trio.to_thread.run_sync(browse, dashboard.url, visit)
    assert (shown.split("\n"), kept.nbytes) == (["arrays of no actor", "8.0 KiB"], 8192)


async def test_it_shows_that_the_program_has_ended(system: ta.System) -> None:
    def visit(page: Page) -> None:
        trio.from_thread.run_sync(ended.set)
        page.wait_for_selector("#link[data-state=wait]")
        assert "does not answer" in page.inner_text("#link")

    ended = trio.Event()
    async with trio.open_nursery() as nursery, open_dashboard(system) as dashboard:
        browser = nursery.start_soon
        browser(trio.to_thread.run_sync, _visit_and_lose, dashboard.url, visit)
        await ended.wait()


def _visit_and_lose(url: str, visit: Callable[[Page], None]) -> None:
    # The browser itself reports on the console that the connection has ended.
    with pytest.raises(AssertionError, match="ERR_"):
        browse(url, visit)


async def test_charts_show_the_time_before_the_first_look(system: ta.System) -> None:
    worker = await system.spawn(Worker, name="worker")

    def visit(page: Page) -> list[int]:
        counts = list[int]()
        for span in ("recent", "whole"):
            page.locator("#span").select_option(span)
            page.wait_for_function(
                "document.querySelector('#chart-rate polyline').getAttribute('points').split(' ').length > 3"
            )
            counts.append(page.locator("#operation option").count())
        return counts

    async with open_dashboard(system, interval=60.0) as dashboard:
        await worker.tell(Fail("it broke"))
        # clock: a longer pause only makes it surer
        await trio.sleep(4.5)
        recent, whole = await trio.to_thread.run_sync(browse, dashboard.url, visit)
    assert recent == whole >= 1


async def test_processes_and_a_held_loop_are_shown(system: ta.System) -> None:
    loop = ta.actors.LoopHolds(count=2, seconds=3.5, longest=3.0, longest_at="model.py:14, in <encode>")

    def visit(page: Page) -> tuple[str, str, str]:
        page.wait_for_selector("#processes tbody tr")
        return page.inner_text("#held"), page.inner_text("#processes tbody"), page.inner_text("#totals")

    async with open_dashboard(system) as dashboard:
        shown = attrs.evolve(dashboard.recorder.snapshot(), loop=loop)
        vars(dashboard.recorder)["snapshot"] = always(shown)
        held, processes, totals = await trio.to_thread.run_sync(browse, dashboard.url, visit)
    assert held == (
        "Tasks held the loop 2 times, 3.50 s in all; the longest time was 3.00 s, "
        "by model.py:14, in <encode>. No other task ran meanwhile."
    )
    assert processes.split("\t")[:2] == ["test", str(os.getpid())]
    assert re.search(r"\t[0-9.]+ [MG]iB\t", processes)
    assert "3.00 s" in totals


async def test_short_waits_have_a_mean_with_digits(system: ta.System) -> None:
    def visit(page: Page) -> list[list[str]]:
        page.wait_for_selector("#readings tbody tr:nth-child(4)")
        rows = page.locator("#readings tbody tr").all()
        return [[cell.inner_text() for cell in row.locator("td").all()] for row in rows]

    async with open_dashboard(system) as dashboard:
        recorder = dashboard.recorder
        waits = recorder.histogram("queue_wait_seconds", bounds=(0.001, 1.0))
        for _ in range(4000):
            waits.observe(0.000_25)
        recorder.histogram("error_ratio", bounds=(0.1, 1.0)).observe(0.0042)
        recorder.counter("busy_seconds").add(0.0125)
        recorder.counter("read_bytes").add(3 << 20)
        found = await trio.to_thread.run_sync(browse, dashboard.url, visit)
    assert [[row[0], *row[2:]] for row in found] == [
        ["queue_wait_seconds", "4000", "250 µs"],
        ["error_ratio", "1", "0.0042"],
        ["busy_seconds", "12.5 ms", ""],
        ["read_bytes", "3.0 MiB", ""],
    ]


async def test_counts_show_their_start(system: ta.System) -> None:
    """Counts of actors begin again with their supervisor; counts of messages do not."""
    parent = await system.spawn(Parent, name="parent")

    async def wait_for(failed: int) -> None:
        with trio.fail_after(60):
            # There is no worker while the parent restarts.
            while ("test/parent/worker", failed) not in [  # noqa: ASYNC110  # nobody tells of a restart
                (one.path, one.failed) for one in system.tree().walk()
            ]:
                await trio.lowlevel.checkpoint()

    def visit(page: Page) -> list[str]:
        page.locator("#operations td[title='test/parent/worker']").wait_for()
        message = page.locator("#operations tr", has=page.locator("td[title='test/parent/worker']"))
        actor = page.locator("#tree tr", has=page.locator("td[title='test/parent/worker']"))
        return [
            page.inner_text("#of-tree ~ .note"),
            page.inner_text("#of-operations ~ .note"),
            actor.locator("td").nth(8).inner_text(),
            message.locator("td").nth(6).inner_text(),
        ]

    async with open_dashboard(system) as dashboard:
        for _ in range(2):
            await parent.tell(PassOn(Fail("it broke")))
        await wait_for(2)
        await parent.tell(Fail("it broke, too"))
        await wait_for(0)
        found = await trio.to_thread.run_sync(browse, dashboard.url, visit)
    assert "if its supervisor restarts, a new actor begins at 0" in found[0]
    assert "outlast every restart" in found[1]
    assert found[2:] == ["0", "2"]
