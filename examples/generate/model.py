"""An interface to all implementations of a model: it takes runs of sequences, and returns the next tokens.

It fits a step of `ta.patterns.ContinuousBatcher`, because any set of sequences is a single request to the
device.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from functools import partial
from importlib.util import find_spec
from itertools import chain, count
from typing import Any, Protocol, TypeAlias

import attrs
import numpy as np
import numpy.typing as npt
from llama import LIKELIEST, SLOTS, Config, Llama

import trio_accel as ta

__all__ = ["GREEDY", "Batch", "Chosen", "Likely", "Model", "Run", "Sampling", "Token", "open_model"]


@attrs.frozen(kw_only=True)
class Sampling:
    """The way of choosing a token.

    Attributes:
        temperature: The divisor of logits; 0 for the likeliest token.
        top_p: The total share of the likeliest tokens to draw from, above 0 and up to 1.
        seed: A draw depends only on it and on the position, so a sequence is the same in any batch.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0

    def draws(self, position: int, count: int) -> npt.NDArray[np.float32]:
        """Return numbers from 0 to 1 for a position and the following ones.

        Philox (Salmon et al., "Parallel random numbers", SC 2011) computes them, with the position as its
        counter. Only the first of the four words for each position is used.
        """
        key = np.array([self.seed % (1 << 64), 0], np.uint64)
        words = np.random.Philox(counter=position, key=key).random_raw(4 * count)[::4]
        return ((words & 0xFFFFFFFF) >> 8).astype(np.float32) * np.float32(2**-24)

    def draw(self, position: int) -> float:
        """Return the number for a position."""
        return float(self.draws(position, 1)[0])


GREEDY = Sampling()


@attrs.frozen
class Likely:
    """The likelihood of a token by the bare model: before temperature, top-p and masks.

    Attributes:
        own: The logarithm of the token's probability.
        others: The likeliest tokens with their logarithms, the likeliest first.
    """

    own: float
    others: Sequence[tuple[int, float]]

    @classmethod
    def of(cls, row: npt.NDArray[np.float64]) -> Likely:
        """Read a row of `likely_of`."""
        own, *numbers = row.tolist()
        tokens = map(int, numbers[:LIKELIEST])
        return cls(own, list(zip(tokens, numbers[LIKELIEST:], strict=True)))


class Token(int):
    """A token with its likelihood.

    Attributes:
        likely: The likelihood.
    """

    likely: Likely


@attrs.frozen(kw_only=True)
class Run:
    """The tokens of one sequence in a step.

    Attributes:
        tokens: The tokens to put into the cache now: a part of its prompt, or the last token made.
        start: The position of the first token.
        pages: The pages of the sequence in order; they have room for these tokens.
        sampling: How the next token is chosen.
        mask: A bit for each token, in int32: 1 if it is allowed next; None if all tokens are allowed.
        is_asked: Whether the next token is a `Token`.
    """

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]
    sampling: Sampling = GREEDY
    mask: npt.NDArray[np.int32] | None = None
    is_asked: bool = False

    @property
    def length(self) -> int:
        """The number of the sequence's tokens in the cache after the step."""
        return self.start + len(self.tokens)


@attrs.frozen(eq=False)
class Batch:
    """The arguments of a step, on the host; see `Llama.step`."""

    rows: npt.NDArray[np.int64]
    tables: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64] | None
    sampling: npt.NDArray[np.float32] | None
    counts: list[list[int]]
    masks: npt.NDArray[np.int32] | None = None
    asked: npt.NDArray[np.int64] | None = None

    @classmethod
    def of(cls, runs: Sequence[Run], config: Config, pages: int, size: int) -> Batch:
        """Combine the runs of a step.

        Args:
            runs: The run of each sequence.
            config: The configuration of the model.
            pages: The number of pages in the cache.
            size: The number of tokens in a page.

        Raises:
            ValueError: A run has zero tokens, more than fit into its pages or the model, or an invalid token
                or page, with which the device would write into another sequence.
        """
        for run in runs:
            _check(run, config, size)
        lengths = np.array([len(run.tokens) for run in runs])
        ends = np.cumsum(lengths) - 1
        owners = np.repeat(np.arange(len(runs)), lengths)
        first = np.array([run.start for run in runs]) - ends + lengths - 1
        positions = np.arange(len(owners)) + first[owners]
        tokens = np.fromiter(chain.from_iterable(run.tokens for run in runs), np.int64, len(owners))
        tables = np.zeros((len(runs), max(-(-run.length // size) for run in runs)), np.int64)
        for row, run in zip(tables, runs, strict=True):
            used = run.pages[: -(-run.length // size)]
            row[: len(used)] = used
        check_numbers("tokens", tokens, config.words)
        check_numbers("pages", tables, pages)
        places = tables[owners, positions // size] * size + positions % size
        is_mixed = len(owners) > len(runs)
        counts = [[len(run.tokens), run.length] for run in runs] if is_mixed else []
        sampling = None
        if any(run.sampling.temperature > 0 for run in runs):
            each = [(run.sampling, run.sampling.draw(run.length)) for run in runs]
            chosen = [(how.temperature, how.top_p, draw) for how, draw in each]
            sampling = np.ascontiguousarray(np.array(chosen, np.float32).T)
        masks = joined_masks([run.mask for run in runs])
        asked = np.flatnonzero([run.is_asked for run in runs])
        rows = np.stack([tokens, positions, places])
        return cls(rows, tables, ends, sampling, counts, masks, asked if len(asked) else None)


def joined_masks(masks: Sequence[npt.NDArray[np.int32] | None]) -> npt.NDArray[np.int32] | None:
    """Combine the masks of a step, in the form for `Llama.step`."""
    rows = [np.append(np.int32(row), mask) for row, mask in enumerate(masks) if mask is not None]
    return np.stack(rows) if rows else None


def _check(run: Run, config: Config, size: int) -> None:
    most = min(config.context, len(run.pages) * size)
    if not run.tokens or run.start < 0 or run.length > most:
        raise ValueError(
            f"a run must have 1 to {most - run.start} tokens after {run.start} (it has {len(run.pages)} "
            f"pages of {size}, and at most {config.context} tokens), got {len(run.tokens)}"
        )


def check_numbers(what: str, numbers: npt.NDArray[np.int64], count: int) -> None:
    """Raise an error unless numbers are 0 to `count` - 1, because the device would access other data."""
    if numbers.min() < 0 or numbers.max() >= count:
        raise ValueError(f"{what} must be 0 to {count - 1}, got {numbers.min()} to {numbers.max()}")


@attrs.frozen(eq=False)
class Chosen:
    """The tokens that a step has chosen.

    Attributes:
        tokens: The next token of each sequence.
        sum: The `checksum` of the input tokens, if some were taken from the device.
        likely: The `likely_of` of the sequences with `is_asked`.
    """

    tokens: npt.NDArray[np.int32]
    sum: int = 0
    likely: npt.NDArray[np.float64] | None = None

    def listed(self, asked: npt.NDArray[np.int64] | None) -> list[int]:
        """Return the tokens, as instances of `Token` for the sequences in `asked`."""
        tokens: list[int] = self.tokens.tolist()
        if asked is not None and self.likely is not None:
            for row, numbers in zip(map(int, asked), self.likely, strict=True):
                tokens[row] = token = Token(tokens[row])
                token.likely = Likely.of(numbers)
        return tokens


class Forward(Protocol):
    """The forward computation of a model on a device."""

    async def __call__(self, batch: Batch) -> Chosen:
        """Put tokens into the cache, and choose the next one of each sequence."""
        ...


@attrs.frozen(eq=False)
class Model:
    """A model on a device, with its cache. `open_model` makes it.

    Attributes:
        config: The configuration.
        caches: Its cache, one array for each layer, pages along the first axis: the arrays of `Pages`.
        forward: The computation of a batch.
        operation: The operation of a step, for `ta.testing.inject_fault`.
        width: The maximum number of sequences in a step that takes its tokens from the previous step, on the
            device; 0 if that is not supported.
        weights: Its weights on the device.
        number: 0, or a unique number if it has other weights over the cache of an open model.
    """

    config: Config
    caches: Sequence[ta.AccelRef]
    forward: Forward
    operation: Any
    width: int = 0
    weights: Mapping[str, ta.AccelRef] = attrs.field(factory=dict[str, ta.AccelRef])
    number: int = 0
    _opening: _Opening | None = None

    def with_weights(self, weights: Mapping[str, ta.AccelRef]) -> AbstractAsyncContextManager[Model]:
        """Open the model with some of its weights replaced, over the same cache."""
        assert self._opening is not None
        return self._opening({**self.weights, **weights}, next(_numbers))

    async def step(self, runs: Sequence[Run]) -> list[int]:
        """Put tokens of several sequences into the cache, and choose the next tokens, in a single request.

        Even a sequence with an unfinished prompt gets a token, which is not needed.

        Args:
            runs: The run of each sequence; no two of them write to one page.

        Raises:
            ValueError: `runs` is empty, or a run is invalid; see `Batch.of`.
            ContextLostError: The context was lost more often than `DeviceOptions.retry` allows.
        """
        if not runs:
            raise ValueError("a step must have at least one sequence")
        pages, size = self.caches[0].shape[:2]
        # Runs with the same number of tokens are adjacent, and are attended together.
        order = sorted(range(len(runs)), key=lambda number: len(runs[number].tokens))
        batch = Batch.of([runs[number] for number in order], self.config, pages, size)
        chosen = await self.forward(batch)
        tokens = [0] * len(runs)
        for number, token in zip(order, chosen.listed(batch.asked), strict=True):
            tokens[number] = token
        return tokens

    async def decode(
        self,
        rows: npt.NDArray[np.int64],
        tables: npt.NDArray[np.int64],
        sampling: npt.NDArray[np.float32] | None,
        masks: npt.NDArray[np.int32] | None = None,
        asked: npt.NDArray[np.int64] | None = None,
    ) -> Chosen:
        """Put one token of each sequence into the cache, and choose the next one: see `Llama.step`.

        Raises:
            ValueError: A token, position or page is out of range.
            ContextLostError: See `step`.
        """
        check_numbers("tokens", rows[0], self.config.words)
        check_numbers("positions", rows[1], self.config.context)
        check_numbers("pages", tables, self.caches[0].shape[0])
        return await self.forward(Batch(rows, tables, None, sampling, [], masks, asked))


_Opening: TypeAlias = Callable[[Mapping[str, ta.AccelRef], int], AbstractAsyncContextManager[Model]]
_numbers = count(1)
# The kernels of OpenBLAS for AVX2 compute up to 8 rows alike.
_MAX_BLOCK = 8


def _program(name: str) -> type[Llama]:
    if name == "numpy":
        return Llama
    from llama_torch import TorchLlama

    return TorchLlama


async def _has_same_bits(
    program: ta.programs.Program[Llama], cls: type[Llama], config: Config, pages: int, size: int
) -> bool:
    """Return whether a sequence has the same bits on its own, among others, and in reverse order."""
    random, count = np.random.default_rng(0), min(pages, 64)
    length = min(size, 5)
    runs = [
        Run(tokens=random.integers(0, config.words, length).tolist(), start=0, pages=[page])
        for page in range(count)
    ]

    async def logits(chosen: Sequence[Run]) -> npt.NDArray[Any]:
        batch = Batch.of(chosen, config, pages, size)
        found = await program.ask(cls.logits, batch.rows, batch.tables, batch.ends, batch.counts)
        return np.asarray(await found.to_host())

    together = await logits(runs)
    reverse, alone = await logits(runs[::-1]), await logits(runs[count // 2 :][:1])
    return np.array_equal(together, reverse[::-1]) and np.array_equal(together[count // 2], alone[0])


@asynccontextmanager
async def open_model(
    device: ta.Device,
    config: Config,
    weights: Mapping[str, npt.NDArray[np.float32]],
    *,
    pages: int,
    size: int = 16,
    dtype: str = "float32",
    forward: str | None = None,
    width: int = 64,
    exact: int = 0,
) -> AsyncGenerator[Model]:
    """Copy a model to a device, and open its computation.

    Args:
        device: The device.
        config: The configuration of the model.
        weights: Its weights, by the names of `weights_of`.
        pages: The number of pages in its cache.
        size: The number of tokens in a page.
        dtype: The dtype of weights and cache: float32; with ``"torch"`` and ``"operations"`` also bfloat16 or
            float16.
        forward: The implementation: ``"numpy"``, ``"torch"``, or ``"operations"`` for the functions of the
            package; None for PyTorch if it is installed, otherwise NumPy.
        width: See `Model.width`; with ``"operations"`` it is 0.
        exact: The number of rows that are computed at once, so that a sequence has the same bits next to any
            others, and however often the context is lost; see `Llama`. Products have fewer rows if the bits
            of a row depend on its index otherwise. 0 for products of any shape. Not supported with
            ``"operations"``.

    Raises:
        NotSupportedError: The model cannot be exact, because rows of products have different bits at
            different positions, in blocks of any size.
    """
    chosen = forward or ("torch" if find_spec("torch") else "numpy")
    if exact and chosen == "operations":
        raise ta.NotSupportedError(
            "exact: the package's functions do not fix the order of sums; use torch or numpy"
        )
    placed = {name: await device.put(array.astype(dtype, copy=False)) for name, array in weights.items()}
    shape = config.cache_shape(pages, size)
    caches = [await device.zeros(shape, dtype) for _ in range(config.layers)]
    if chosen == "operations":
        opening: _Opening = partial(_open_operations, config, caches)
    else:
        sizes = [(exact, block) for block in _blocks_of(exact)]
        opening = partial(_open_program, device, _program(chosen), config, caches, width, sizes)
    async with opening(placed, 0) as model:
        yield model


@asynccontextmanager
async def _open_operations(
    config: Config, caches: Sequence[ta.AccelRef], weights: Mapping[str, ta.AccelRef], number: int
) -> AsyncGenerator[Model]:
    from operations import Operations

    operations, opening = Operations(weights, caches, config), partial(_open_operations, config, caches)
    try:
        yield Model(config, caches, operations, ta.graphs.Replay, 0, weights, number, opening)
    finally:
        operations.close()


def _blocks_of(exact: int) -> list[int]:
    """Return the numbers of rows to try for the products of an exact model, the fastest first."""
    return [exact, *(block for block in range(min(_MAX_BLOCK, exact - 1), 0, -1) if exact % block == 0)]


@asynccontextmanager
async def _open_program(
    device: ta.Device,
    cls: type[Llama],
    config: Config,
    caches: Sequence[ta.AccelRef],
    width: int,
    sizes: Sequence[tuple[int, int]],
    weights: Mapping[str, ta.AccelRef],
    number: int,
) -> AsyncGenerator[Model]:
    given: Any = weights, caches, await device.zeros((SLOTS * width,), "int64")
    (exact, block), *others = sizes
    options: Any = {"config": attrs.asdict(config), "exact": exact, "block": block}
    async with ta.open_program(device, cls, *given, **options) as program:

        async def step(batch: Batch) -> Chosen:
            first = (batch.rows, batch.tables, batch.ends, batch.sampling, batch.counts)
            found: bytes = await program.ask(cls.step, *first, batch.masks, batch.asked)
            end = 4 * len(batch.tables)
            likely = None
            if batch.asked is not None:
                likely = np.frombuffer(found[end + 8 :]).reshape(len(batch.asked), -1)
            total = int.from_bytes(found[end : end + 8], "little")
            return Chosen(np.frombuffer(found[:end], np.int32), total, likely)

        opening = partial(_open_program, device, cls, config, caches, width)
        # The check writes to the cache, so it must run before all sequences.
        if number or not exact or await _has_same_bits(program, cls, config, *caches[0].shape[:2]):
            same, operation = partial(opening, sizes[:1]), program.operation(cls.step)
            yield Model(config, caches, step, operation, width, weights, number, same)
            return
    if not others:
        raise ta.NotSupportedError(
            "exact: on this device, the bits of a product's row depend on the other rows or its index"
        )
    async with opening(others, weights, number) as model:
        yield model
