"""Programs that do what they should not; workers import this module."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

import trio_accel as ta
from trio_accel.programs import Array


class Fragile:
    """Cannot be made while there is a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        if Path(path).exists():
            raise LookupError("the file is there")

    def works(self) -> int:
        return 1

    def breaks(self) -> None:
        Path(self.path).touch()
        raise ValueError("it breaks")


class ExitsInConstructor:
    def __init__(self, how: str) -> None:
        raises(how)


class ColdStart:
    def warm_up(self) -> None:
        raise OSError(5, "no warmth")


def raises(how: str) -> None:
    """Raise what no program should."""
    errors: dict[str, Any] = {
        "SystemExit": SystemExit(3),
        "KeyboardInterrupt": KeyboardInterrupt(),
        "GeneratorExit": GeneratorExit(),
        "BaseException": BaseException("base"),
        "ContextPoisonedError": ta.ContextPoisonedError("not really"),
        "DeviceLostError": ta.DeviceLostError("not really"),
        "StaleRefError": ta.StaleRefError("not really"),
        "ActorStoppedError": ta.ActorStoppedError("not really", path="nowhere"),
        "StopIteration": StopIteration(),
        "RecursionError": None,
        "UnprintableError": UnprintableError(),
    }
    if how == "RecursionError":
        raises(how)
    raise errors[how]


class UnprintableError(Exception):
    """Cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")

    def add_note(self, note: str, /) -> None:
        raise RuntimeError("no notes")


class Returns:
    """Returns what was not declared."""

    @ta.programs.method(out=lambda: ((2, 3), "float32"))
    def shape(self) -> Array:
        return np.zeros((3, 2), np.float32)

    @ta.programs.method(out=lambda: ((2, 3), "float32"))
    def dtype(self) -> Array:
        return np.zeros((2, 3))

    @ta.programs.method(out=lambda: ((2, 3), "float32"))
    def nothing(self) -> None:
        return None

    @ta.programs.method(out=lambda: ((2, 3), "float32"))
    def nested(self) -> Array:
        return [np.zeros((2, 3), np.float32)]

    @ta.programs.method(out=lambda: ((2, 3), "float32"))
    def other(self, *, out: Array = None) -> Array:
        return np.zeros((2, 3), np.float32)

    @ta.programs.method(out=lambda: None)
    def something(self) -> int:
        return 1

    def an_object(self) -> Any:
        return {"a": [object()]}

    def strings(self) -> Any:
        return np.array(["a"])

    def masked(self) -> Any:
        return np.ma.masked_array([1.0], [True])

    def coroutine(self) -> Any:
        return (number for number in ())

    def deep(self) -> Any:
        value: Any = 1
        for _ in range(50):
            value = [value]
        return value

    def long(self) -> Any:
        return "x" * (1 << 21)

    def own(self, x: Array) -> Any:
        return [x, x[:1], x.T]


class Rules:
    """Wrong rules of outputs."""

    @ta.programs.method(out=lambda x: "float32")
    def no_pair(self, x: Array) -> Array:
        return x

    @ta.programs.method(out=lambda x: ((-1,), "float32"))
    def negative(self, x: Array) -> Array:
        return x

    @ta.programs.method(out=lambda x: ((2,), "no dtype"))
    def no_dtype(self, x: Array) -> Array:
        return x

    @ta.programs.method(out=lambda x: 1 / 0)
    def broken(self, x: Array) -> Array:
        return x


class NoParameter:
    """Declares an argument that its method does not have."""

    def __init__(self, weights: Array) -> None: ...

    @ta.programs.method(updates=["y"])
    def adds(self, x: Array) -> None: ...


class NoSelf:
    """Declares its state without an owner."""

    def __init__(self, weights: Array) -> None: ...

    @ta.programs.method(updates=["weights"])
    def adds(self, x: Array) -> None: ...


class BadRule:
    """Declares outputs by a rule that does not take its arguments."""

    def __init__(self, weights: Array) -> None: ...

    @ta.programs.method(out=lambda x: (x.shape, x.dtype))
    def adds(self, x: Array, how: str) -> Array:
        return x


class Misspelled:
    """Declares state that its constructor does not take."""

    def __init__(self, weights: Array) -> None: ...

    @ta.programs.method(updates=["self.wieghts"])
    def adds(self, x: Array) -> None: ...


class Keeps:
    """Keeps what it is lent."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def keep(self, x: Array) -> float:
        self.kept += [x, x[1:]]
        return float(x.sum())

    def keep_again(self, x: Array) -> float:
        return self.keep(x)

    @ta.programs.method(updates=["target"])
    def keep_update(self, x: Array, target: Array) -> None:
        target[...] = x
        self.kept.append(target[1:])

    @ta.programs.method(out=lambda x: (x.shape, x.dtype))
    def keep_out(self, x: Array, *, out: Array = None) -> None:
        out[...] = x
        self.kept.append(memoryview(out))

    @ta.programs.method(updates=["target"], out=lambda x, target: (x.shape, x.dtype))
    def leave_cycle(self, x: Array, target: Array, *, out: Array = None) -> None:
        cycle: list[Any] = [x[1:], target, out]
        cycle.append(cycle)
        out[...] = target = x

    def text(self) -> str:
        return "a\ud800" * 1000

    def echo(self, text: str, x: Array) -> dict[str, Any]:
        return {text: x, "lone": [text]}

    def write(self) -> list[str]:
        said: list[str] = []
        for array in self.kept:
            try:
                array[...] = 666.0
                said.append("written")
            except ValueError as error:
                said.append(str(error))
        return said

    def write_input(self, x: Array) -> None:
        x[...] = 0.0

    def set_input_back(self, x: Array) -> None:
        x.setflags(write=True)


class Process:
    """Does to its process what nobody should."""

    def __init__(self, x: Array) -> None:
        self.x = x

    def sets_back(self) -> None:
        self.x.flags.writeable = True

    def sums(self) -> float:
        return float(self.x.sum())

    def writes(self) -> None:
        self.x[...] = 0.0

    def prints(self) -> int:
        print("of a program", flush=True)
        sys.stderr.write("of a program\n")
        return 1

    def closes(self, first: int) -> float:
        os.closerange(first, 256)
        return float(self.x.sum())

    def exits(self) -> None:
        os._exit(7)

    def never_returns(self) -> None:
        while True:
            time.sleep(0.01)

    def starts_threads(self) -> int:
        found: list[int] = []
        threads = [threading.Thread(target=found.append, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return len(found)


class Methods:
    """Names that cannot be asked."""

    value = 3

    def _private(self) -> None: ...

    def warm_up(self) -> None: ...

    async def waits(self) -> None: ...

    def generates(self) -> Any:
        yield 1

    @staticmethod
    def static() -> None: ...

    @classmethod
    def of_class(cls) -> None: ...

    @property
    def computed(self) -> int:
        return 1

    def exponential(self, x: Array) -> Array:
        return np.exp(x)

    def two(self, a: Any, b: Any, *, c: Any = 1) -> Any:
        return [a, b, c]


class Streams:
    """Closes the standard streams of its process."""

    def closes(self) -> int:
        os.closerange(0, 3)
        return 1


class Exhausts:
    """Finds no memory, and counts its calls."""

    def __init__(self) -> None:
        self.calls = 0

    @ta.programs.method(updates=["x"])
    def allocates(self, x: Array) -> None:
        self.calls += 1
        raise MemoryError

    def told(self) -> int:
        return self.calls


def cut_memory(x: Array, application: int) -> int:
    """Cut what the application shares with its workers; returns how often the system has refused it."""
    refused = 0
    for link in Path(f"/proc/{application}/fd").iterdir():
        try:
            if "memfd:trio_accel" in os.readlink(link):
                os.truncate(link, 0)
        except PermissionError:
            refused += 1
        except FileNotFoundError:
            continue  # the application has closed it meanwhile
    return refused
