"""The load for ``--faults``: clients that request embeddings while contexts are lost."""

from __future__ import annotations

import hashlib
from collections import Counter
from contextlib import suppress
from itertools import count
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import trio

import trio_accel as ta

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from minilm import Encoder
    from minilm_files import Batch

__all__ = [
    "Check",
    "EncodeFault",
    "EncodeLoad",
    "Outcome",
    "RequestRecord",
    "break_under_load",
    "changed_since",
    "hashes_of",
    "strike",
]

_BEFORE = 32
# Seconds between two faults.
_BETWEEN = 1.0
# Seconds until a fault without recovery counts as permanent.
_PATIENCE = 60.0


@attrs.frozen(kw_only=True)
class Check:
    """A number that must not exceed a limit; NaN exceeds every limit.

    Attributes:
        name: The name of the quantity.
        value: The measured number.
        limit: The largest right number.
    """

    name: str
    value: float
    limit: float

    @property
    def is_ok(self) -> bool:
        """Whether the number is within its limit."""
        return bool(self.value <= self.limit)


@attrs.frozen(kw_only=True)
class RequestRecord:
    """The outcome of a request.

    Attributes:
        client: The number of the client, from 1.
        request: The number of its request, from 1.
        begun: The generation of the device at the request.
        ended: The generation of the device at its end.
        outcome: ``"answered"``; ``"answered after a loss"`` if a context was lost meanwhile, so that the
            request ran again or waited; or the class of the client's error.
        is_same: Whether the embedding has the same bits as before the faults; None without an embedding.
    """

    client: int
    request: int
    begun: int
    ended: int
    outcome: str
    is_same: bool | None


@attrs.frozen(kw_only=True)
class EncodeFault:
    """The effect of a fault.

    Attributes:
        generation_before: The generation of the device before it.
        generation_after: The generation that answered again.
        recovery_ms: The time from its injection to the first answer of the next context, in milliseconds;
            None without an answer.
    """

    generation_before: int
    generation_after: int
    recovery_ms: float | None


@attrs.frozen(kw_only=True)
class Outcome:
    """The results of all faults.

    Attributes:
        fault: The kind of the faults.
        clients: The number of concurrent clients.
        requests: The requests of all clients.
        outcomes: The number of requests by outcome.
        faults: The effect of each fault.
        weights_lost: The number of lost or changed weight arrays, by their hashes.
        records: The outcome of every request, in the order of their ends.
    """

    fault: str
    clients: int
    requests: int
    outcomes: Mapping[str, int]
    faults: Sequence[EncodeFault]
    weights_lost: int
    records: Sequence[RequestRecord]

    @property
    def recovery_ms(self) -> float | None:
        """The median of all faults; None if one of them has not recovered."""
        times = [fault.recovery_ms for fault in self.faults if fault.recovery_ms is not None]
        return median(times) if len(times) == len(self.faults) else None

    def checks(self) -> list[Check]:
        """Return the conditions that must hold."""
        unlike = sum(record.is_same is False for record in self.records)
        failed = sum(record.is_same is None for record in self.records)
        names = {(record.client, record.request) for record in self.records}
        unrecovered = sum(fault.recovery_ms is None for fault in self.faults)
        return [
            Check(
                name="requests lost or answered twice",
                value=_unlike(self.requests, names, self.records),
                limit=0,
            ),
            Check(name="requests that failed", value=failed, limit=0),
            Check(name="embeddings that differ from those before the faults", value=unlike, limit=0),
            Check(name="faults not felt, or not recovered from", value=unrecovered, limit=0),
            Check(name="arrays of weights lost or changed", value=self.weights_lost, limit=0),
        ]

    def summarize(self) -> str:
        """Return the results in one line."""
        answered = sum(record.is_same is not None for record in self.records)
        text = f"{len(self.faults)} faults, {self.requests} requests: {answered} answered"
        return text if self.recovery_ms is None else f"{text}, again after {self.recovery_ms:.0f} ms"


def _unlike(requests: int, names: set[tuple[int, int]], records: Sequence[RequestRecord]) -> int:
    return abs(requests - len(names)) + len(records) - len(names)


@attrs.define(eq=False)
class EncodeLoad:
    """Clients that continuously request embeddings, one sentence at a time."""

    device: ta.Device
    program: ta.programs.Program[Encoder]
    cls: type[Encoder]
    batches: Sequence[Batch]
    width: int
    asked: int = attrs.field(default=0, init=False)
    records: list[RequestRecord] = attrs.field(factory=list[RequestRecord], init=False)
    _expected: list[bytes] = attrs.field(factory=list[bytes], init=False)
    _asking: dict[int, int] = attrs.field(factory=dict[int, int], init=False)
    _is_over: bool = attrs.field(default=False, init=False)
    _changed: trio.Event = attrs.field(factory=trio.Event, init=False)

    async def expect(self) -> None:
        """Compute the embeddings of some sentences one by one, before anything fails."""
        for batch in self.batches[:_BEFORE]:
            self._expected.append((await self._embed(batch)).tobytes())

    def start(self, nursery: trio.Nursery, clients: int) -> None:
        """Start clients, as tasks of a nursery."""
        for client in range(1, clients + 1):
            nursery.start_soon(self._ask_on, client)

    def stop(self) -> None:
        """Stop sending new requests."""
        self._is_over = True

    async def wait_settled(self, seconds: float) -> None:
        """Wait for `seconds` and for all current requests, so that no request meets two faults."""
        under_way = dict(self._asking)
        await trio.sleep(seconds)
        while any(self._asking.get(client) == request for client, request in under_way.items()):
            await self.wait_change()

    async def wait_change(self) -> None:
        """Wait until another request has ended."""
        await self._changed.wait()

    async def _ask_on(self, client: int) -> None:
        for request in count(1):
            if self._is_over:
                return
            self.asked += 1
            self._asking[client] = request
            await self._ask(client, request)

    async def _ask(self, client: int, request: int) -> None:
        index, begun = (client + request) % len(self._expected), self.device.generation
        is_same = None
        try:
            found = await self._embed(self.batches[index])
        except (ta.AccelError, ta.ActorError) as error:
            outcome = type(error).__name__
            if isinstance(error, ta.DeviceLostError):
                raise
        else:
            is_same = found.tobytes() == self._expected[index]
            outcome = "answered" if self.device.generation == begun else "answered after a loss"
        self.records.append(
            RequestRecord(
                client=client,
                request=request,
                begun=begun,
                ended=self.device.generation,
                outcome=outcome,
                is_same=is_same,
            )
        )
        changed, self._changed = self._changed, trio.Event()
        changed.set()

    async def _embed(self, batch: Batch) -> Any:
        made = await self.program.ask(self.cls.encode, batch.ids, batch.mask, self.width)
        host = await made.to_host()
        made.release()
        return host


async def break_under_load(
    load: EncodeLoad,
    weights: ta.weights.LoadedArrays,
    *,
    clients: int,
    faults: int,
    tell: Callable[[str], object],
) -> Outcome:
    """Poison the context every second, `faults` times, and record the outcomes of all requests."""
    reports: list[EncodeFault] = []
    await load.expect()
    before = await hashes_of(weights)
    text = _text_of(load)
    tell(f"{faults} rounds of faults, at least {(faults + 1) * _BETWEEN:.0f} s")
    async with trio.open_nursery() as nursery:
        load.start(nursery, clients)
        for number in range(faults):
            await load.wait_settled(_BETWEEN)
            reports.append(report := await _break(load))
            tell(_told(number + 1, report))
        await trio.sleep(_BETWEEN)
        load.stop()
    return Outcome(
        fault=text,
        clients=clients,
        requests=load.asked,
        outcomes=Counter(record.outcome for record in load.records),
        faults=reports,
        weights_lost=await changed_since(weights, before),
        records=load.records,
    )


def _text_of(load: EncodeLoad) -> str:
    return "an index out of range" if hasattr(load.cls, "look_up") else "poison of the context"


async def _break(load: EncodeLoad) -> EncodeFault:
    start, generation, known = trio.current_time(), load.device.generation, len(load.records)
    await strike(load)
    recovered = False
    with trio.move_on_after(_PATIENCE):
        while not recovered:
            await load.wait_change()
            recovered = any(
                record.ended > generation and record.is_same is not None for record in load.records[known:]
            )
    return EncodeFault(
        generation_before=generation,
        generation_after=load.device.generation,
        recovery_ms=(trio.current_time() - start) * 1e3 if recovered else None,
    )


async def strike(load: EncodeLoad) -> None:
    """Poison the context; on CUDA, with an index out of range in the program's own code."""
    look_up = getattr(load.cls, "look_up", None)
    if look_up is None:
        # Inject a fault, because the CPU backend does not run kernels that could fail.
        ta.testing.inject_fault(load.device, load.program.operation(load.cls.encode), poison=True)
        return
    ids = await load.device.put(np.array([1 << 40], np.int64))
    # The request ends with an error. The generation shows whether the context is lost.
    with suppress(ta.AccelError, ta.ActorError):
        await load.program.ask(look_up, ids)


def _told(number: int, report: EncodeFault) -> str:
    if report.recovery_ms is None:
        return f"  fault {number}: nobody was answered again"
    after = f"generation {report.generation_after} answers after {report.recovery_ms:.0f} ms"
    return f"  fault {number}: generation {report.generation_before} is lost, {after}"


async def hashes_of(weights: Mapping[str, ta.AccelRef]) -> dict[str, str]:
    """Return the hash of each weight array."""
    found: dict[str, str] = {}
    for name, array in weights.items():
        host = await array.to_host()
        found[name] = await trio.to_thread.run_sync(_hash, host)
    return found


def _hash(host: Any) -> str:
    return hashlib.sha256(host).hexdigest()


async def changed_since(weights: Mapping[str, ta.AccelRef], before: Mapping[str, str]) -> int:
    """Return the number of lost or changed arrays."""
    try:
        after = await hashes_of(weights)
    except ta.StaleRefError:
        return len(before)
    return sum(after[name] != digest for name, digest in before.items())
