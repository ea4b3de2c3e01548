"""A cache in pages over arrays of a device (Kwon et al., "PagedAttention", SOSP 2023).

A sequence has a table of the pages that hold its tokens. Tables share pages with a common prefix, and after a
fork. A page belongs to a single table while the table writes to it. So when a context is lost, only the
newest page of a few tables is affected, and their step writes the same numbers there again. Decision D184
gives the reasons.
"""

from __future__ import annotations

import operator
from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import count, groupby
from typing import Any, TypeAlias

import attrs
import numpy as np
import trio
from trio.lowlevel import enable_ki_protection

from ..actors import Reading, checked_options, must_be_count
from ..devices import AccelRef, Stack
from ._checks import NoRoomError

__all__ = ["PageTable", "Pages", "PagesFullError", "PagesStatistics"]

_COPIES_AT_ONCE = 64
# The tenant for a first page, or the previous page's serial for any other; and the tokens.
_Key: TypeAlias = tuple[Hashable, int, tuple[int, ...]]
_Arrays: TypeAlias = AccelRef | Sequence[AccelRef]
_Host: TypeAlias = np.ndarray[Any, Any]
_Sources: TypeAlias = Sequence[AccelRef | _Host]


class PagesFullError(NoRoomError):
    """There are not enough free pages now; nothing was changed.

    Attributes:
        free: The number of free pages.
        requested: The number of additional pages requested.
    """

    def __init__(self, memory: str, *, free: int, requested: int) -> None:
        super().__init__(
            f"pages {memory}: {requested} requested, and {free} free; close a table, or try again later"
        )
        self.free, self.requested = free, requested


@attrs.frozen(kw_only=True)
class PagesStatistics:
    """Counts of a cache: ``used + free == count``, at any time.

    Attributes:
        count: Pages on the device.
        used: Pages with users.
        free: Pages without users.
        cached: Free pages kept for a later common prefix, until their room is needed.
        spilled: Pages in host memory.
        shared_tokens: Tokens already available when a table was opened.
        copied: Pages copied before a table wrote to them.
        evicted: Known pages that were overwritten because their room was needed.
    """

    count: int
    used: int
    free: int
    cached: int
    spilled: int
    shared_tokens: int
    copied: int
    evicted: int


class _Pool:
    """All pages of a cache, by number.

    Attributes:
        users: The number of tables that use each page.
        known: Findable pages without users, the least recently used first. All users of a page use the pages
            before it, and release them later. So no page is evicted before its successors.
        doubtful: Pages without users to which a copy failed. They are overwritten before their use.
        tallies: The counters of `PagesStatistics`.
    """

    def __init__(self, arrays: Sequence[AccelRef], size: int, host: int, *, shares: bool) -> None:
        self.arrays, self.size, self.host, self.shares = arrays, size, host, shares
        self.count, self.used = arrays[0].shape[0], 0
        self.tallies = Counter(spilled=0, shared_tokens=0, copied=0, evicted=0)
        self.known: OrderedDict[int, None] = OrderedDict()
        self.doubtful: list[int] = []
        self.users, self._unknown = [0] * self.count, list(reversed(range(self.count)))
        # A serial identifies a page's content, and represents all tokens up to its end. It is never reused.
        self._index: dict[_Key, int] = {}
        self._keys: dict[int, _Key] = {}
        self._serials, self._next_serial = [0] * self.count, count(1)
        self.healing, self.spilling = trio.Lock(), trio.Lock()

    def find(self, tokens: Sequence[int], limit: int, tenant: Hashable) -> list[int]:
        """Return the pages with the longest known prefix of a tenant's tokens, at most `limit`."""
        pages: list[int] = []
        while len(pages) < limit and (key := self._key(pages, tokens, tenant)) in self._index:
            pages.append(self._index[key])
        return pages

    def offer(self, prefix: list[int], page: int, tokens: Sequence[int], tenant: Hashable) -> int:
        """Let a full page be found after others, or use an already known page with its tokens instead."""
        key = self._key(prefix, tokens, tenant)
        match = self._index.setdefault(key, page)
        if match == page:
            self._keys[page], self._serials[page] = key, next(self._next_serial)
        else:
            self.use([match])
            self.drop([page])
        return match

    def _key(self, prefix: list[int], tokens: Sequence[int], tenant: Hashable) -> _Key:
        start = len(prefix) * self.size
        part = tuple(tokens[start : start + self.size])
        return (None, self._serials[prefix[-1]], part) if prefix else (tenant, 0, part)

    def use(self, pages: Iterable[int]) -> None:
        """Count another user for each page."""
        for page in pages:
            self.known.pop(page, None)
            self.used += not self.users[page]
            self.users[page] += 1

    def take(self, page_count: int) -> list[int]:
        """Take pages for a single table, in ascending order, because neighbours are copied together.

        Raises:
            PagesFullError: There are not enough pages.
        """
        _must_fit("on the device", page_count, self.count - self.used)
        while len(self._unknown) < page_count:
            page, _ = self.known.popitem(last=False)
            del self._index[self._keys.pop(page)]
            self.tallies["evicted"] += 1
            self._unknown.append(page)
        taken = sorted(self._unknown.pop() for _ in range(page_count))
        self.use(taken)
        return taken

    def drop(self, pages: Sequence[int], in_doubt: int = 0) -> None:
        """Remove a user from each page; a copy to the first `in_doubt` pages has failed."""
        for index, page in reversed(list(enumerate(pages))):
            self.users[page] -= 1
            self.used -= not self.users[page]
            if not self.users[page] and page in self._keys:
                self.known[page] = None
            elif not self.users[page]:
                (self.doubtful if index < in_doubt else self._unknown).append(page)

    async def heal(self) -> None:
        """Overwrite doubtful pages, because an array with damaged contents cannot be read as a whole."""
        async with self.healing:
            while self.doubtful:
                for array in self.arrays:
                    await array[self.doubtful[0]].fill(0)
                self._unknown.append(self.doubtful.pop(0))

    async def copy(self, pages: Sequence[int], positions: Sequence[int], sources: _Sources) -> None:
        """Write to the first pages, from positions in other arrays, one source for each array."""
        jobs, errors = list[tuple[AccelRef, AccelRef | _Host]](), list[Exception]()
        for offset, run in groupby(zip(pages, positions, strict=False), key=lambda two: two[0] - two[1]):
            part = [position for _, position in run]
            start, end = part[0], part[-1] + 1
            for array, source in zip(self.arrays, sources, strict=True):
                jobs.append((array[start + offset : end + offset], source[start:end]))

        pending_jobs = iter(jobs)

        async def work() -> None:
            for target, source in pending_jobs:
                try:
                    await target.assign(source)
                except Exception as error:  # noqa: BLE001  # raised below
                    errors.append(error)
                if errors:
                    break

        # Several at once go between two steps of others. One by one, each would wait for a step.
        async with trio.open_nursery() as nursery:
            for _ in range(min(len(jobs), _COPIES_AT_ONCE)):
                nursery.start_soon(work)
        if errors:
            raise errors[0]

    async def fetch(self, pages: Sequence[int]) -> list[_Host]:
        """Copy pages to pinned host memory.

        Raises:
            PagesFullError: The machine has less of it than `host` pages.
        """
        count = len(pages)
        try:
            host = [array.device.host_empty((count, *array.shape[1:]), array.dtype) for array in self.arrays]
        except MemoryError as error:
            raise PagesFullError("in host memory", free=0, requested=count) from error
        for array, out in zip(self.arrays, host, strict=True) if pages else ():
            # One copy on the device: pages of a table seldom are neighbours.
            stack = await array.device.ask(Stack([array[page] for page in pages], None))
            await stack.to_host(out=out)
        return host


class PageTable(AbstractContextManager["PageTable"]):
    """The pages of one sequence. Made by `Pages.open` and `fork`; a context manager that closes it.

    For each step: call `reserve` for room, have the step write after `length`, by `pages`, and after its end
    call `wrote` with the written tokens. Only one task may do so at a time.
    """

    def __init__(self, pool: _Pool, tokens: Sequence[int], pages: list[int], tenant: Hashable) -> None:
        self._pool, self._tokens, self._pages, self._tenant = pool, list(tokens), pages, tenant
        self._host: list[_Host] | None = None
        self._is_closed = False

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def pages(self) -> tuple[int, ...]:
        """The numbers of the pages in order; empty when it is spilled or closed.

        `reserve` and `wrote` may replace pages, so build block tables again for each step.
        """
        return tuple(self._pages)

    @property
    def length(self) -> int:
        """The number of tokens in the pages."""
        return len(self._tokens)

    @property
    def room(self) -> int:
        """The length up to which tokens may be written without another `reserve`."""
        return max(self.length, 0 if self._shared() else len(self._pages) * self._pool.size)

    @property
    def exclusive_pages(self) -> int:
        """The number of pages that no other table uses: `close` and `spill` make them free."""
        return sum(self._pool.users[page] == 1 for page in self._pages)

    @property
    def is_spilled(self) -> bool:
        """Whether its tokens are in host memory."""
        return self._host is not None

    @enable_ki_protection
    async def reserve(self, length: int) -> None:
        """Make room for tokens up to a length, in pages that no other table uses.

        If the next token belongs to a shared page, the page is copied first, on the device. A spilled table
        is restored first. If the call fails or is cancelled, nothing has changed. After a lost context call
        it again, because the sources of the copies are intact.

        Args:
            length: The number of tokens, including existing ones.

        Raises:
            PagesFullError: There are not enough free pages.
            ValueError: `length` is below the current length, or exceeds the capacity of all pages.
            trio.BusyResourceError: Another task has changed this table meanwhile.
            trio.ClosedResourceError: The table is closed.
            ContextLostError, DeviceLostError, StaleRefError: As of `AccelRef.assign`.
        """
        pool = self._pool
        await pool.heal()
        # No other task runs until the pages are taken.
        self._check("reserve")
        must_be_count("reserve: length", length, minimum=self.length, maximum=pool.count * pool.size)
        host, old_pages, first, shared = self._host, self._pages, self.length // pool.size, self._shared()
        if host is None and length <= self.room:
            return
        pages = list(old_pages) if host is None else pool.find(self._tokens, first, self._tenant)
        known_count, fresh = len(pages), list[int]()
        if host is not None:
            pool.use(pages)
        positions = shared if host is None else range(known_count, self._filled())
        try:
            fresh = pool.take(max(-(-length // pool.size) - known_count, 0) + len(shared))
            if positions:
                await pool.copy(fresh, positions, pool.arrays if host is None else host)
            self._check("reserve", old_pages)
        except BaseException:
            # Pages found earlier stay valid, and are not doubtful.
            pool.drop(fresh + (pages if host is not None else []), in_doubt=len(positions))
            raise
        if shared:
            pages[first] = fresh.pop(0)
            pool.drop(shared)
            pool.tallies["copied"] += 1
        elif host is not None:
            self._leave()
        self._pages = pages + fresh
        self._offer(known_count)

    @enable_ki_protection
    def wrote(self, tokens: Iterable[int]) -> None:
        """Record the tokens that a finished step has written after the first `length` tokens.

        Full pages are offered to other tables. If a page with equal tokens, and equal ones before, is already
        known, this table takes that page and releases its own.

        Args:
            tokens: Integers of at least 0.

        Raises:
            ValueError: There is not enough room, since `reserve` was not called; or a number is negative.
            TypeError: The tokens are not integers.
            trio.ClosedResourceError: The table is closed.
        """
        self._check("wrote")
        new_tokens, first = _checked(tokens), self.length // self._pool.size
        if new_tokens and self.length + len(new_tokens) > self.room:
            raise ValueError(f"wrote: there is room up to {self.room} tokens; call reserve before each step")
        self._tokens += new_tokens
        self._offer(first)

    @enable_ki_protection
    def fork(self) -> PageTable:
        """Make a table with the same tokens and tenant, which shares the pages.

        Call it between two steps. Then call `reserve` before the next one, for either table.

        Raises:
            ValueError: The table is spilled.
            trio.ClosedResourceError: The table is closed.
        """
        self._check("fork")
        if self.is_spilled:
            raise ValueError("fork: the table is spilled; call restore() first")
        pages = self._pages[: self._filled()]
        self._pool.use(pages)
        return PageTable(self._pool, self._tokens, pages, self._tenant)

    @enable_ki_protection
    async def spill(self) -> None:
        """Move the tokens to host memory, and release the pages on the device.

        Shared pages are copied. If the call fails or is cancelled, nothing has changed. On a spilled table it
        does nothing.

        Raises:
            PagesFullError: There is not enough room in host memory now, or `host` of `Pages` is too small.
            OutOfMemoryError: The device lacks memory for a copy of one array's pages.
            trio.BusyResourceError, trio.ClosedResourceError: As of `reserve`.
        """
        pool = self._pool
        # Only one at a time, because each spill also takes memory on the device.
        async with pool.spilling:
            self._check("spill")
            if self.is_spilled:
                return
            filled, old_pages = self._filled(), self._pages
            _must_fit("in host memory", filled, pool.host - pool.tallies["spilled"])
            host = await pool.fetch(old_pages[:filled])
            self._check("spill", old_pages)
        self._leave()
        self._host = host
        pool.tallies["spilled"] += filled

    async def restore(self) -> None:
        """Bring the tokens back from host memory; pages that are known by now are shared.

        If the call fails or is cancelled, the tokens are still in host memory. If the table is not spilled,
        it does nothing.

        Raises:
            PagesFullError: There are not enough free pages.
            trio.BusyResourceError, trio.ClosedResourceError: As of `reserve`.
            ContextLostError, DeviceLostError, StaleRefError: As of `AccelRef.assign`.
        """
        await self.reserve(self.length)

    @enable_ki_protection
    def close(self) -> None:
        """Release the pages; work in flight there ends before others write. A second call does nothing."""
        self._leave()
        self._is_closed = True

    def _leave(self) -> None:
        self._pool.drop(self._pages)
        self._pool.tallies["spilled"] -= len(self._host[0]) if self._host is not None else 0
        self._pages, self._host = [], None

    def _check(self, name: str, pages: list[int] | None = None) -> None:
        if self._is_closed:
            raise trio.ClosedResourceError(f"{name}: the table is closed")
        if pages is not None and self._pages is not pages:
            raise trio.BusyResourceError(f"{name}: another task has changed this table meanwhile")

    def _filled(self) -> int:
        """Count the pages that hold tokens."""
        return -(-self.length // self._pool.size)

    def _shared(self) -> list[int]:
        """Return the page for the next token, if other tables also use it."""
        first = self.length // self._pool.size
        return [page for page in self._pages[first : first + 1] if self._pool.users[page] > 1]

    def _offer(self, first: int) -> None:
        """Offer the full pages, from the page with index `first`."""
        # A new list lets a task notice that another task has changed this table.
        self._pages = list(self._pages)
        for index in range(first, self.length // self._pool.size if self._pool.shares else 0):
            prefix, page = self._pages[:index], self._pages[index]
            self._pages[index] = self._pool.offer(prefix, page, self._tokens, self._tenant)


class Pages:
    """A cache in pages over arrays of a device, such as the keys and values of `nn.paged_attention`.

    Each page has an index along the first axis of every array, and holds the data of `size` tokens. The data
    of a token must only depend on the tokens up to it, because tables with a common prefix share pages. Pages
    of closed tables stay findable until their room is needed; the least recently used page is replaced first.

    The arrays belong to the caller, and nobody else writes to them. With ``isolation="process"`` they survive
    the loss of a context, and so do all pages except the pages being written. Use the object in only one Trio
    run.

    Args:
        arrays: One array, or several, such as one for each layer: on one device, with at least two axes, and
            with an equal number of pages along the first.
        size: The number of tokens in a page.
        host: The maximum number of pages in host memory, for `PageTable.spill`; it is pinned on devices with
            separate memory.
        share: Whether tables share the pages of common prefixes.

    Raises:
        TypeError: `arrays` are not device arrays, or a number is not an integer.
        ValueError: `arrays` is empty, they differ in device or pages, one has fewer axes, or a number is out
            of range.

    Attributes:
        count: The number of pages on the device.
    """

    @checked_options
    def __init__(self, arrays: _Arrays, size: int = 16, *, host: int = 0, share: bool = True) -> None:
        refs = tuple(arrays) if isinstance(arrays, Sequence) else (arrays,)
        if not all(isinstance(ref, AccelRef) for ref in refs):
            raise TypeError(f"Pages: arrays must be arrays of a device, got {refs!r}")
        is_one = len({(ref.device, ref.shape[:1]) for ref in refs}) == 1
        if not is_one or not all(ref.size and ref.shape[1:] for ref in refs):
            rule = "of one device, with equally many pages along the first of two or more axes"
            raise ValueError(f"Pages: arrays must be one or more {rule}, got {refs!r}")
        must_be_count("Pages: size", size)
        self._pool = _Pool(refs, size, must_be_count("Pages: host", host, minimum=0), shares=share)
        self.count: int = self._pool.count

    @property
    def used(self) -> int:
        """The number of pages with users."""
        return self._pool.used

    @property
    def free(self) -> int:
        """The number of pages without users, including pages kept for a later common prefix."""
        return self._pool.count - self._pool.used

    @enable_ki_protection
    def open(self, tokens: Iterable[int] = (), *, tenant: Hashable = None) -> PageTable:
        """Open a table for a sequence.

        Args:
            tokens: The first tokens of the sequence. Full pages of the longest known prefix are shared at
                once, so `PageTable.length` tokens exist already. At least one token is left to compute, since
                its result predicts the next token.
            tenant: Only tables of one tenant share pages. If strangers share them, a prompt is answered
                sooner if somebody else has sent its prefix. Whoever measures that can guess the prompts of
                others, page by page. So give strangers different tenants.

        Raises:
            TypeError, ValueError: `tokens` are not integers of at least 0, or `tenant` is not hashable.
        """
        token_list, pool = _checked(tokens), self._pool
        hash(tenant)
        pages = self._known_pages(token_list, tenant)
        pool.use(pages)
        length = len(pages) * pool.size
        pool.tallies["shared_tokens"] += length
        return PageTable(pool, token_list[:length], pages, tenant)

    async def heal(self) -> None:
        """Overwrite pages damaged by a lost copy, as `reserve` does, because arrays with them cannot be read.

        Call it if a step finds damaged contents while another task restores a table, and call the step again.

        Raises:
            ContextLostError, DeviceLostError, StaleRefError: As of `AccelRef.assign`.
        """
        await self._pool.heal()

    def demand(self, tokens: Iterable[int], *, tenant: Hashable = None) -> int:
        """Return the number of free pages that a table needs for `open` and one more token."""
        users, token_list = self._pool.users, _checked(tokens)
        shared = sum(users[page] > 0 for page in self._known_pages(token_list, tenant))
        return len(token_list) // self._pool.size + 1 - shared

    def _known_pages(self, tokens: Sequence[int], tenant: Hashable) -> list[int]:
        return self._pool.find(tokens, max(len(tokens) - 1, 0) // self._pool.size, tenant)

    def statistics(self) -> PagesStatistics:
        """Return the counts of pages."""
        it = self._pool
        return PagesStatistics(
            count=it.count, used=it.used, free=self.free, cached=len(it.known), **it.tallies
        )

    def readings(self) -> Iterator[Reading]:
        """Yield the counts for metrics, as `ActorContext.show_readings` takes them."""
        for name, value in attrs.asdict(self.statistics()).items():
            kind = "counter" if name in {"shared_tokens", "copied", "evicted"} else "gauge"
            # Prometheus reserves the suffix `_count` for histograms.
            shown = "pages_limit" if name == "count" else f"pages_{name}"
            yield Reading(name=shown, kind=kind, help="See PagesStatistics.", value=value)


def _checked(tokens: Iterable[int]) -> list[int]:
    checked = list(map(operator.index, tokens))
    if min(checked, default=0) < 0:
        raise ValueError(f"a token must be an integer of at least 0, got {min(checked)}")
    return checked


def _must_fit(location: str, requested: int, free: int) -> None:
    if requested > free:
        raise PagesFullError(location, free=free, requested=requested)
