"""A program with a workflow, which a test kills and starts again.

For each line of standard input, which is a folder, it forks a process that runs the workflow there, and
prints its number and then its status. So the test does not wait for imports. The process appends a line to
the file `calls` whenever a step or a call by `once` has begun and ended.
"""

import os
import sys
from pathlib import Path

import trio

from trio_accel.agents import Workflow, current_step
from trio_accel.cluster import SqliteStore

FOLDER = Path()
TURNS = 5
flow = Workflow("killed")


def note(text: str) -> None:
    """Write a line, which a kill of the program does not lose."""
    with (FOLDER / "calls").open("a") as file:
        file.write(text + "\n")


async def work(name: str, result: str) -> str:
    """Be at work for some milliseconds."""
    note(f"begin {name} {current_step().key}")
    # clock: the time that this work takes decides nothing
    await trio.sleep(0.015)
    note(f"end {name}")
    return result


@flow.step()
async def pages(question: str) -> list[str]:
    """Find pages."""
    await work("pages", "")
    return [f"{question} {number}" for number in range(4)]


@flow.step(over="pages", at_once=2)
async def score(page: str) -> str:
    """Score a page."""
    return await work(current_step().name, page.upper())


@flow.step()
async def loop(question: str) -> str:
    """Ask a model and a tool in turns."""
    text = question
    for turn in range(TURNS):
        text = await current_step().once(f"turn {turn}", work, f"loop.{turn}", f"{text}{turn}")
    return text


@flow.step()
async def answer(score: list[str], loop: str) -> str:
    """Answer."""
    return await work("answer", f"{loop} of {', '.join(score)}")


async def main() -> None:
    """Run it, or continue."""
    store = SqliteStore(str(FOLDER / "store"))
    await store.open()
    try:
        found = await flow.run(store=store, key="one", question="q")
        note(f"result {found.results['answer']}")
    finally:
        await store.aclose()


if __name__ == "__main__":
    for line in sys.stdin:
        FOLDER = Path(line.strip())
        child = os.fork()
        if child == 0:
            try:
                trio.run(main)
                os._exit(0)
            finally:
                os._exit(1)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
