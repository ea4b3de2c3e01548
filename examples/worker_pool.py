"""A worker pool with back-pressure: a bounded mailbox slows its producer. Run it with --jobs 100."""

from __future__ import annotations

import argparse

import attrs
import trio

import trio_accel as ta

WORKERS, CAPACITY = 4, 8


@attrs.frozen
class Square(ta.Request["Worker", int]):
    """Square a number."""

    number: int


@attrs.frozen
class Job(ta.Message["Pool"]):
    """Have a worker square a number."""

    number: int


class Worker(ta.Actor):
    """A worker that handles one request at a time."""

    @ta.handles(Square)
    async def square(self, request: Square) -> int:
        """Square a number; the sleep simulates a disk, a network, or a device."""
        await trio.sleep(0.002)
        return request.number**2


class Pool(ta.Actor):
    """A pool that passes each job to an idle worker. One is idle, because `limit` equals their number."""

    def __init__(self, workers: list[ta.Ref[Worker]], begun: list[int], squares: dict[int, int]) -> None:
        self.idle, self.begun, self.squares = list(workers), begun, squares

    @ta.handles(Job, group="jobs", limit=WORKERS)
    async def job(self, message: Job) -> None:
        """Run a job, concurrently with the other jobs in its group."""
        self.begun.append(message.number)
        worker = self.idle.pop()
        self.squares[message.number] = await worker.ask(Square(message.number))
        self.idle.append(worker)


async def run(jobs: int) -> int:
    """Return 0 if all jobs ran in order, and the number of unfinished jobs stayed within its bound."""
    begun, squares, ahead = list[int](), dict[int, int](), 0
    async with ta.open_system("squares") as system:
        workers = [await system.spawn(Worker) for _ in range(WORKERS)]
        mailbox = ta.MailboxOptions(capacity=CAPACITY)
        pool = await system.spawn(Pool, workers, begun, squares, name="pool", mailbox=mailbox)
        for number in range(jobs):
            await pool.tell(Job(number))  # waits until the mailbox has space
            ahead = max(ahead, number + 1 - len(squares))
        print(system.tree())
        await pool.stop(drain=True)
    most = CAPACITY + 1 + WORKERS  # in the mailbox, taken from it, and running
    print(f"sum of squares {sum(squares.values())}, at most {ahead} of {most} jobs on their way at once")
    is_right = begun == list(range(jobs)) and squares == {number: number**2 for number in begun}
    return 0 if is_right and ahead <= most else 1


def main() -> int:
    """Return the exit code."""
    parser = argparse.ArgumentParser(description="A worker pool whose mailbox slows its producer.")
    parser.add_argument("--jobs", type=int, default=100, help="numbers to square")
    return trio.run(run, parser.parse_args().jobs)


if __name__ == "__main__":
    raise SystemExit(main())
