"""An actor crashes under load: the tree before and after, and every request's outcome. Try --requests 9."""

from __future__ import annotations

import argparse
from collections import Counter

import attrs
import trio

import trio_accel as ta


@attrs.frozen
class Read(ta.Request["Pages", str]):
    """Read a page."""

    number: int


class Pages(ta.Actor):
    """A reader of pages, which crashes if a page does not exist."""

    @ta.handles(Read)
    async def read(self, request: Read) -> str:
        """Read a page; the sleep simulates a slow disk."""
        await trio.sleep(0.01)
        if request.number < 0:
            raise RuntimeError(f"no page {request.number}")
        return f"page {request.number}"


class Index(ta.Actor):
    """An actor that depends on the pages, so it must restart together with them."""

    def __init__(self, pages: ta.Ref[Pages]) -> None:
        self.pages = pages


async def client(number: int, pages: ta.Ref[Pages], outcomes: Counter[str]) -> None:
    """Read a page, and record the outcome."""
    try:
        text = await pages.ask(Read(number))
    except ta.ActorFailedError as error:
        outcomes[f"failed: {error.__cause__}"] += 1
    else:
        outcomes["served" if text == f"page {number}" else "WRONG"] += 1


async def run(requests: int) -> int:
    """Return 0 if one request failed, all others were served, and the right actors restarted."""
    outcomes = Counter[str]()
    options = ta.SystemOptions(strategy=ta.Strategy.REST_FOR_ONE)
    async with ta.open_system("library", options=options) as system:
        await system.spawn(Pages, name="archive")  # started earlier, so it is not restarted
        pages = await system.spawn(Pages, name="pages")
        await system.spawn(Index, pages, name="index")
        print(f"before\n{system.tree()}")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client, -1, pages, outcomes)
            await trio.sleep(0.001)  # the bad request is being handled now, so the others queue after it
            for number in range(1, requests):
                nursery.start_soon(client, number, pages, outcomes)
        print(f"after\n{system.tree()}\n{dict(outcomes)}")
        restarts = {actor.name: actor.restarts for actor in system.tree().children}
    is_fair = outcomes == Counter({"failed: no page -1": 1, "served": requests - 1})
    return 0 if is_fair and restarts == {"archive": 0, "pages": 1, "index": 1} else 1


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="An actor crashes under load and recovers.")
    parser.add_argument("--requests", type=int, default=6, help="2 or more; the first one fails")
    return trio.run(run, parser.parse_args().requests)


if __name__ == "__main__":
    raise SystemExit(main())
