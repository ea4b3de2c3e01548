"""Entities of the tests: another process finds them by this module."""

from __future__ import annotations

import gc
import os
import signal
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import attrs
import numpy as np
import trio

import trio_accel as ta
from trio_accel import cluster
from trio_accel.cluster import _link as links


async def until(condition: Callable[[], object]) -> None:
    """Wait until something holds; the caller has a deadline."""
    while not condition():  # noqa: ASYNC110  # what changes is elsewhere
        await trio.sleep(0.01)


@attrs.frozen
class Add(ta.Request[Any, float]):
    """Add to the total, and reply it."""

    x: float


@attrs.frozen
class Where(ta.Request[Any, "tuple[str, int, int]"]):
    """Reply node, process and epoch."""


@attrs.frozen
class Fail(ta.Request[Any, None]):
    """Fail with this error, after a change."""

    error: Exception


@attrs.frozen
class Echo(ta.Request[Any, Any]):
    """Reply the value, after some seconds."""

    value: Any
    seconds: float = 0.0


@attrs.frozen
class FailThere(ta.Request[Any, None]):
    """Fail with an error of a class that only the process of the entity has."""


@attrs.frozen
class Held(ta.Request[Any, int]):
    """Reply how many requests the process of the entity has to serve."""


@attrs.frozen
class Write(ta.Request[Any, None]):
    """Write down in a file when it is served, and by which process.

    With `until` it is served until that file exists. Another file reports that it has begun: `file` with the
    key after its name.
    """

    file: str
    seconds: float
    until: str | None = None


@attrs.frozen
class Note(ta.Message[Any]):
    """Add to the total without a reply."""

    x: float


@attrs.frozen
class Die(ta.Request[Any, None]):
    """End the process: by its own exit, a signal that nobody can catch, a fault, or in `load`."""

    how: str


@attrs.frozen
class Hold(ta.Request[Any, int]):
    """Take some seconds, and reply how many of these were served."""

    seconds: float


@attrs.frozen
class Pass(ta.Request[Any, Any]):
    """Write the own key down, wait for a later table, and pass the request on to the `Counter` of a key."""

    file: str
    key: str
    request: ta.Request[Any, Any]
    epoch: int


async def write_down(key: object, message: Write) -> None:
    began = time.monotonic()
    try:
        if message.until is None:
            # clock: the time that this work takes decides nothing
            await trio.sleep(message.seconds)
        else:
            Path(f"{message.file} {key}").touch()  # noqa: ASYNC240  # an empty file
            await until(Path(message.until).exists)
    finally:
        line = f"{key} {began} {time.monotonic()} {os.getpid()}\n"
        number = os.open(message.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(number, line.encode())
        os.close(number)


class Counter(cluster.Entity):
    """A total that ends with its node."""

    def __init__(self, home: cluster.Home) -> None:
        super().__init__(home)
        self.total = 0.0

    @ta.handles(Add)
    async def add(self, message: Add) -> float:
        self.total += message.x
        return self.total

    @ta.handles(Note)
    async def note(self, message: Note) -> None:
        self.total += message.x

    @ta.handles(Fail)
    async def fail(self, message: Fail) -> None:
        raise message.error

    @ta.handles(Held)
    async def held(self, message: Held) -> int:
        return sum(len(one._scopes) for one in gc.get_objects() if type(one) is links.Link)

    @ta.handles(Write)
    async def write(self, message: Write) -> None:
        await write_down(self.home.key, message)

    @ta.handles(Pass)
    async def pass_on(self, message: Pass) -> Any:
        with open(message.file, "a") as file:  # noqa: ASYNC230  # a line
            file.write(f"{self.home.key}\n")  # noqa: ASYNC232  # a line
        await until(lambda: self.home.cluster.epoch > message.epoch)
        return await self.home.cluster.entity(Counter, message.key).ask(message.request)

    @ta.handles(FailThere)
    async def fail_there(self, message: FailThere) -> None:
        module = types.ModuleType("only_there")
        module.__dict__["Odd"] = type("Odd", (Exception,), {"__module__": "only_there"})
        sys.modules["only_there"] = module
        raise module.Odd("an odd thing")

    @ta.handles(Where)
    async def where(self, message: Where) -> tuple[str, int, int]:
        return self.home.node, os.getpid(), self.home.epoch

    @ta.handles(Echo)
    async def echo(self, message: Echo) -> Any:
        # clock: the time that this work takes decides nothing
        await trio.sleep(message.seconds)
        return message.value


class Stubborn(cluster.Entity):
    """Does not end when it is cancelled."""

    policy = ta.Policy(grace=0.05)

    @ta.handles(Write)
    async def write(self, message: Write) -> None:
        with trio.CancelScope(shield=True):
            await write_down(self.home.key, message)


class Account(cluster.DurableEntity):
    """A total on the device that outlives its node."""

    save_every = 5
    refuses = (KeyError,)

    async def load(self, saved: cluster.Saved | None) -> None:
        total = np.zeros(128) if saved is None else saved["total"]
        self.total = await self.home.device.put(total)

    async def save(self) -> cluster.Saved:
        return {"total": self.total}

    async def _add(self, x: float) -> float:
        await ta.linalg.axpy(1.0, np.full(128, x), self.total)
        return float((await self.total.to_host())[0])

    @ta.handles(Add)
    async def add(self, message: Add) -> float:
        return await self._add(message.x)

    @ta.handles(Note)
    async def note(self, message: Note) -> None:
        await self._add(message.x)

    @ta.handles(Fail)
    async def fail(self, message: Fail) -> None:
        if not isinstance(message.error, KeyError):
            await self._add(1000.0)
        raise message.error

    @ta.handles(Where)
    async def where(self, message: Where) -> tuple[str, int, int]:
        return self.home.node, os.getpid(), self.home.epoch

    @ta.handles(Echo)
    async def echo(self, message: Echo) -> Any:
        # clock: the time that this work takes decides nothing
        await trio.sleep(message.seconds)
        return message.value


class Dice(cluster.DurableEntity):
    """Replies what nobody can repeat."""

    save_every = 3

    async def load(self, saved: cluster.Saved | None) -> None:
        pass

    async def save(self) -> cluster.Saved:
        return {}

    @ta.handles(Add)
    async def add(self, message: Add) -> str:
        return os.urandom(8).hex()


class Equal(cluster.DurableEntity):
    """Replies equal values, whose bytes are others when they are repeated."""

    save_every = 3
    is_repeated: ClassVar[bool] = False

    async def load(self, saved: cluster.Saved | None) -> None:
        pass

    async def save(self) -> cluster.Saved:
        return {}

    @ta.handles(Echo)
    async def reply(self, message: Echo) -> object:
        text = str(b"open", "ascii")
        # Sets of these numbers iterate in the order in which they were added.
        numbers = [8, 0] if self.is_repeated else [0, 8]
        match message.value:
            case "shared text":
                return {"was": text, "is": str(b"open", "ascii") if self.is_repeated else text}
            case "a set":
                return [set(numbers)]
            case _:
                return {frozenset(numbers): {frozenset((number,)) for number in numbers}}


class Ledger(cluster.DurableEntity):
    """Keeps the ids of its messages, and arrays of several kinds."""

    save_every = 2

    async def load(self, saved: cluster.Saved | None) -> None:
        self.ids: list[str] = [] if saved is None else list(saved["ids"])
        self.weights = await self.home.device.put(np.zeros((3, 4)) if saved is None else saved["weights"])
        self.host = np.zeros(2, np.float32) if saved is None else saved["host"]

    async def save(self) -> cluster.Saved:
        return {"ids": tuple(self.ids), "weights": self.weights, "host": self.host}

    @ta.handles(Add)
    async def add(self, message: Add) -> tuple[list[str], float, float, str]:
        assert self.home.message_id is not None
        self.ids.append(self.home.message_id)
        self.host = self.host + np.float32(message.x)
        await ta.linalg.axpy(1.0, np.full((3, 4), message.x), self.weights)
        total = float((await self.weights.to_host()).sum())
        return self.ids, total, float(self.host.sum()), str(self.host.dtype)


class FailingStore(cluster.SqliteStore):
    """A store that is away while a file exists."""

    def _check_way(self) -> None:
        if os.path.exists(self.path + ".away"):
            raise cluster.StoreError("the store is away")

    async def write(self, *arguments: Any) -> None:
        self._check_way()
        await super().write(*arguments)

    async def take(self, *arguments: Any) -> Any:
        self._check_way()
        return await super().take(*arguments)


class Picky(cluster.DurableEntity):
    """A total that refuses by TypeError, which other code also raises."""

    save_every = 50
    refuses = (TypeError,)

    async def load(self, saved: cluster.Saved | None) -> None:
        self.total = 0.0 if saved is None else saved["total"]

    async def save(self) -> cluster.Saved:
        return {"total": self.total}

    @ta.handles(Add)
    async def add(self, message: Add) -> float:
        if message.x < 0:
            raise TypeError("an amount must be positive")
        self.total += message.x
        return self.total

    @ta.handles(Note)
    async def note(self, message: Note) -> None:
        self.total += message.x
        if not message.x:
            raise ValueError("a note of nothing")

    @ta.handles(Echo)
    async def echo(self, message: Echo) -> Any:
        self.total += 1000.0
        return lambda: message.value


class Fragile(cluster.DurableEntity):
    """Ends its process on request."""

    async def load(self, saved: cluster.Saved | None) -> None:
        self.count = 0 if saved is None else saved["count"]
        if self.home.key == "lethal load":
            os._exit(1)

    async def save(self) -> cluster.Saved:
        return {"count": self.count}

    @ta.handles(Die)
    async def die(self, message: Die) -> None:
        if message.how == "exit":
            os._exit(3)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "fault": signal.SIGSEGV}[message.how])

    @ta.handles(Hold)
    async def hold(self, message: Hold) -> int:
        # clock: the time that this work takes decides nothing
        await trio.sleep(message.seconds)
        self.count += 1
        return self.count


@attrs.frozen
class Peek(ta.Request["Counted", "dict[str, float]"]):
    """Reply the total."""


@attrs.frozen
class Tamper(ta.Message["Counted"]):
    """Change the state in this way, by a handler that must only read."""

    how: str


@attrs.frozen
class Later(ta.Request["Counted", float]):
    """Have an `Account` add 1.0 after some seconds."""

    key: str
    seconds: float


class Counted(cluster.DurableEntity):
    """A total with replies that may have more fields in another release."""

    save_every = 50
    refuses = (KeyError,)
    more: ClassVar[dict[str, float]] = {}
    peeked: ClassVar[dict[str, float]] = {}

    async def load(self, saved: cluster.Saved | None) -> None:
        self.totals = {"total": 0.0} if saved is None else dict(saved["totals"])
        self.seen = list[str]()

    async def save(self) -> cluster.Saved:
        if "unsaveable" in str(self.home.key):
            raise ValueError("this cannot be saved")
        return {"totals": self.totals}

    @ta.handles(Add)
    async def add(self, message: Add) -> dict[str, float]:
        self.totals["total"] += message.x
        return self.totals | self.more

    @ta.handles(Peek, reads=True)
    async def peek(self, message: Peek) -> dict[str, float]:
        return self.totals | self.more | self.peeked

    @ta.handles(Tamper, reads=True)
    async def tamper(self, message: Tamper) -> None:
        if message.how == "attribute":
            self.totals = {"total": 7.0}
        elif message.how == "new attribute":
            self.added = 1
        elif message.how == "item":
            self.totals["total"] += 1.0
        elif message.how == "list":
            self.seen.append("x")
        elif message.how == "then refuses":
            self.totals["total"] += 1.0
            raise KeyError("refused")

    @ta.handles(Later)
    async def later(self, message: Later) -> float:
        # clock: the time that this work takes decides nothing
        await trio.sleep(message.seconds)
        return await self.home.cluster.entity(Account, message.key).ask(Add(1.0))
