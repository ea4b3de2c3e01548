"""A Llama in NumPy as a program, which computes a step of several sequences over a paged cache.

Touvron et al., "LLaMA", 2023; Su et al., "RoFormer", 2021 (rotary embeddings); Ainslie et al., "GQA", 2023;
Kwon et al., "PagedAttention", 2023.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, TypeAlias, cast

import attrs
import numpy as np
import numpy.typing as npt

import trio_accel as ta
from trio_accel.programs import Array

__all__ = [
    "LIKELIEST",
    "SLOTS",
    "Config",
    "Llama",
    "allowed_of",
    "checksum",
    "likely_of",
    "multipliers",
    "packed",
    "random_weights",
    "rotations",
    "rounded",
    "weights_of",
]

SLOTS = 4
"""The number of steps with tokens on the device. The second of two running steps reads the first's tokens."""

KEYS = 256
"""The number of keys in each part of an exact model's attention; see `Llama`."""

LIKELIEST = 20
"""The number of likely tokens for which a step returns log probabilities."""


@attrs.frozen(kw_only=True)
class Config:
    """The shape of a model.

    Attributes:
        layers: The number of layers.
        heads: The number of query heads.
        groups: The number of key heads, and of value heads; each serves ``heads / groups`` query heads.
        width: The size of a head, an even number. A token has ``heads * width`` numbers.
        inner: The width of the hidden layer after the attention.
        words: The number of tokens in the vocabulary.
        context: The maximum number of tokens in a sequence.
        base: The base of the frequencies of rotary embeddings.
        epsilon: The number added to mean squares.
    """

    layers: int
    heads: int
    groups: int
    width: int
    inner: int
    words: int
    context: int
    base: float
    epsilon: float

    def cache_shape(self, pages: int, size: int) -> tuple[int, int, int, int]:
        """Return the shape of a layer's cache: keys and values of `pages` pages with `size` tokens each."""
        return (pages, size, 2 * self.groups, self.width)


def weights_of(config: Config) -> dict[str, tuple[int, ...]]:
    """Return the names and shapes of the weights. Products with the same input are joined into one."""
    numbers = config.heads * config.width
    found: dict[str, tuple[int, ...]] = {"words": (config.words, numbers), "norm": (numbers,)}
    for layer in range(config.layers):
        found |= {
            f"{layer}.attention_norm": (numbers,),
            f"{layer}.query_key_value": ((config.heads + 2 * config.groups) * config.width, numbers),
            f"{layer}.attention_output": (numbers, numbers),
            f"{layer}.feed_norm": (numbers,),
            f"{layer}.gate_up": (2 * config.inner, numbers),
            f"{layer}.down": (numbers, config.inner),
        }
    return found


def random_weights(config: Config, seed: int = 0) -> dict[str, npt.NDArray[np.float32]]:
    """Return random float32 weights, scaled so that numbers neither vanish nor grow through the layers."""
    random = np.random.default_rng(seed)
    made: dict[str, npt.NDArray[np.float32]] = {}
    for name, shape in weights_of(config).items():
        made[name] = random.standard_normal(shape, np.float32)
        made[name] *= np.float32(0.1 if len(shape) == 1 else shape[1] ** -0.5)
        made[name] += np.float32(len(shape) == 1)
    return made


def rotations(config: Config) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Return the cosines and sines of each position's rotation: two arrays of shape (context, width).

    The rotation turns pairs of numbers, 2i and 2i + 1, as the weights of a GGUF file require. Each sine has
    the sign of its number: ``x * cosine + x[neighbour] * sine``.
    """
    rates = config.base ** (-np.arange(0, config.width, 2) / config.width)
    angles = np.repeat((np.arange(config.context)[:, None] * rates).astype(np.float32), 2, axis=1)
    signs = np.where(np.arange(config.width) % 2, 1, -1).astype(np.float32)
    return np.cos(angles), np.sin(angles) * signs


def rounded(count: int) -> int:
    """Round up to 1, 2, 3, 4, 6, 8, 12, 16, 24 and so on, so that at most a third is padding."""
    power = 1 << max(count - 1, 0).bit_length()
    return power * 3 // 4 if power >= 4 and count <= power * 3 // 4 else power


@lru_cache
def multipliers(count: int) -> npt.NDArray[np.int64]:
    """Return the odd factors of tokens in a `checksum`."""
    return np.random.default_rng(count).integers(0, 1 << 62, count) * 2 + 1


def checksum(tokens: npt.NDArray[np.int64]) -> int:
    """Return a 64-bit number, which differs for other tokens except by chance."""
    return int((tokens * multipliers(len(tokens))).sum()) % (1 << 64)


def packed(made: npt.NDArray[np.int64]) -> bytes:
    """Return the result of a step: its tokens and, last, the checksum of the input tokens."""
    return made[:-1].astype(np.int32).tobytes() + made[-1:].tobytes()


def allowed_of(masks: npt.NDArray[np.int32], words: int) -> npt.NDArray[np.bool_]:
    """Return which tokens the masks of `Llama.step` allow: an array of shape (masks, words)."""
    bits = np.ascontiguousarray(masks[:, 1:]).view(np.uint8)
    return np.unpackbits(bits, axis=1, count=words, bitorder="little").view(np.bool_)


def likely_of(logits: Any, chosen: Any) -> npt.NDArray[np.float64]:
    """Return the log probabilities of tokens before masks, temperature and top-p.

    Args:
        logits: Array of shape (rows, words).
        chosen: The chosen token in each row.

    Returns:
        For each row the logarithm of its token's probability; the `LIKELIEST` tokens, the likeliest first;
        and their logarithms.
    """
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=1, keepdims=True))
    best = np.argpartition(-rows, LIKELIEST - 1, axis=1)[:, :LIKELIEST]
    best = np.take_along_axis(best, np.argsort(-np.take_along_axis(rows, best, 1), axis=1), 1)
    own, others = (np.take_along_axis(rows, one, 1) for one in (chosen[:, None], best))
    return np.concatenate([own, best.astype(np.float64), others], axis=1)


_Group: TypeAlias = tuple[int, int, Any, Any]  # first row, end, pages, mask


class Llama:
    """A model that computes next tokens in float32.

    A library chooses the order of the sums in a product by the number of its rows, and the next token may
    depend on the last bit of a sum. So the other sequences in a batch could change the text of a sequence. An
    exact model (D223) computes the same bits next to any other sequences, because each product has the same
    number of rows, and each attention processes blocks of `KEYS` keys in order. A prompt is processed in the
    same way as generated tokens, so its chunks and shared prefixes do not change a bit either.

    Some libraries compute the last rows of a product by another kernel, such as OpenBLAS without AVX-512. For
    these, an exact model divides its products into blocks of fewer rows.

    Args:
        weights: Arrays by the names of `weights_of`.
        caches: For each layer an array of the shape `Config.cache_shape`.
        made: The tokens chosen by the last steps: `SLOTS` times the number of sequences in a step. None if no
            step takes tokens from there.
        config: The configuration, by `attrs.asdict`.
        exact: The number of rows that an exact model computes at once; 0 for other models.
        block: The number of rows in each product of an exact model, a divisor of `exact`; 0 for `exact`.
    """

    xp: Any = np
    """The library for the computation."""

    def __init__(
        self,
        weights: Mapping[str, Array],
        caches: Sequence[Array],
        made: Array | None = None,
        *,
        config: Mapping[str, Any],
        exact: int = 0,
        block: int = 0,
    ) -> None:
        self.config, self.exact, self.block = Config(**config), exact, block or exact
        self.weights, self.caches = dict(weights), list(caches)
        self.made: Any = made
        self._cosines, self._sines = rotations(self.config)
        self._neighbours: Any = np.arange(self.config.width) ^ 1

    @ta.programs.method(updates=["self.caches", "self.made"], idempotent=True)
    def step(
        self,
        rows: Array,
        tables: Array,
        ends: Array | None,
        sampling: Array | None,
        counts: Sequence[Sequence[int]],
        masks: Array | None = None,
        asked: Array | None = None,
    ) -> bytes:
        """Put tokens of several sequences into the cache, and choose the next token of each.

        A repeated step writes the same numbers to the same slots, so a lost step runs again.

        Args:
            rows: Array of shape (3, n), int64: for each token its number, its position in its sequence, and
                the slot of its key and value: ``page * size + offset``. The tokens of a sequence are
                adjacent, and their positions follow one another. If each sequence has one token, there may be
                two more rows: the slot of `made` with the token, or -1; and the slot of `made` for the next
                token. So a step can be requested while the previous step runs.
            tables: Array of shape (sequences, most), int64: the pages of each, padded with any page.
            ends: Array of shape (sequences,), int64: the index of each sequence's last token in `rows`; None
                if each sequence has a single token.
            sampling: Array of shape (3, sequences), float32: temperature, top-p, and a draw from 0 to 1; or
                None, if all take the likeliest token.
            counts: For each sequence the number of its tokens in `rows`, and their total number, including
                these. It is empty if each sequence has a single token, because such requests differ only in
                their arrays, and are sent to a worker as a template.
            masks: Array of shape (constrained, 1 + words / 32), int32: the number of a sequence, and then a
                bit for each token, 1 if it is allowed next. None if all tokens are allowed.
            asked: Array of int64: the numbers of the sequences that need `likely_of`.

        Returns:
            The next token of each sequence: see `packed`. The numbers of `likely_of` follow.
        """
        tokens = self.taken(rows)
        logits = self.forward([tokens, *rows[1:3]], tables, ends, counts)
        chosen = self._choose(self._masked(logits, masks), sampling)
        likely = b"" if asked is None else likely_of(logits[asked], chosen[asked]).tobytes()
        if len(rows) == 3:
            return packed(np.append(chosen, 0)) + likely
        self.made[rows[4]] = chosen
        return packed(np.append(chosen, np.sum(tokens * multipliers(len(tokens))))) + likely

    @ta.programs.method(updates=["self.caches"], idempotent=True)
    def logits(self, rows: Array, tables: Array, ends: Array, counts: Sequence[Sequence[int]]) -> Array:
        """Compute a step as `step`, but return the logits: float32, of shape (sequences, words)."""
        return self.forward(rows, tables, ends, counts)

    def forward(self, rows: Any, tables: Any, ends: Any | None, counts: Sequence[Sequence[int]]) -> Any:
        """Put tokens into the cache, and return the logits, as arrays of the library `xp`."""
        if not self.exact:
            return self.layers(rows, tables, ends, counts)
        parts = self._parts(rows, tables, counts)
        logits = self.xp.concatenate([self._pass(*part) for part in parts])
        return logits[: len(rows[0])] if ends is None else logits[ends]

    def _parts(self, rows: Any, tables: Any, counts: Sequence[Sequence[int]]) -> Iterator[tuple[Any, Any]]:
        """Yield the tokens in parts, each with the pages of its sequence.

        The last part repeats the last token, which writes the same numbers again.
        """
        number, pages, per = len(rows[0]), tables.shape[1], self._pages_of_part()
        owners = (
            self._array(np.repeat(np.arange(len(tables)), [count for count, _ in counts])) if counts else None
        )
        columns = self._range(0, rounded(-(-pages // per)) * per).clip(max=pages - 1)
        for first in range(0, number, self.exact):
            place = self._range(first, first + self.exact).clip(max=number - 1)
            owner = place if owners is None else owners[place]
            yield [row[place] for row in rows], tables[owner][:, columns]

    def _pages_of_part(self) -> int:
        size: int = self.caches[0].shape[1]
        return max(KEYS // size, 1)

    def _pass(self, rows: Any, tables: Any) -> Any:
        """Run the layers on a part."""
        return self.layers(rows, tables, None, ())

    def layers(self, rows: Any, tables: Any, ends: Any | None, counts: Sequence[Sequence[int]]) -> Any:
        """Run the layers on all tokens at once."""
        config, weights = self.config, self.weights
        tokens, positions, places = rows
        cosines, sines = self._cosines[positions][:, None], self._sines[positions][:, None]
        groups = [] if self.exact else self._groups(tables, positions, counts)
        turning = config.heads + config.groups  # Values are not rotated.
        x = weights["words"][tokens]
        for layer, cache in enumerate(self.caches):
            made = self._dense(f"{layer}.query_key_value", self._norm(f"{layer}.attention_norm", x))
            made = made.reshape(len(x), -1, config.width)
            turned = made[:, :turning]
            turned[...] = turned * cosines + turned[..., self._neighbours] * sines
            cache.reshape(-1, *cache.shape[2:])[places] = made[:, config.heads :]
            query = made[:, : config.heads]
            if self.exact:
                mixed = self._attend_in_parts(query, cache, tables, positions)
            else:
                mixed = self._attention(query, cache, groups)
            x = x + self._dense(f"{layer}.attention_output", mixed)
            both = self._dense(f"{layer}.gate_up", self._norm(f"{layer}.feed_norm", x))
            inner = self._silu(both[:, : config.inner]) * both[:, config.inner :]
            x = x + self._dense(f"{layer}.down", inner)
        last = x if ends is None else x[ends]
        return self._dense("words", self._norm("norm", last))  # the embeddings are also the last matrix

    def taken(self, rows: Any) -> Any:
        """Return the input tokens."""
        if len(rows) == 3:
            return rows[0]
        return cast("Any", np.where(rows[3] < 0, rows[0], self.made[rows[3]]))

    def _groups(self, tables: Any, positions: Any, counts: Sequence[Sequence[int]]) -> list[_Group]:
        """Return groups of adjacent sequences with equal numbers of tokens, to attend together."""
        found: list[_Group] = []
        size, row, first = self.caches[0].shape[1], 0, 0
        counts = counts or [[1, tables.shape[1] * size]] * len(tables)
        while first < len(counts):
            last = first + 1
            while last < len(counts) and counts[last][0] == counts[first][0]:
                last += 1
            stop = row + sum(count for count, _ in counts[first:last])
            pages = tables[first:last, : -(-max(length for _, length in counts[first:last]) // size)]
            own = positions[row:stop].reshape(last - first, -1)
            found.append((row, stop, pages, self._mask(pages.shape[1] * size, own)))
            row, first = stop, last
        return found

    def _attention(self, query: Any, cache: Any, groups: Sequence[_Group]) -> Any:
        heads, width, kinds = self.config.heads, self.config.width, self.config.groups
        made = self._empty_like(query).reshape(len(query), -1)
        for row, stop, pages, mask in groups:
            # Query heads that share a key head become its queries, so that keys are not repeated.
            asked = query[row:stop].reshape(len(pages), -1, kinds, heads // kinds * width).swapaxes(1, 2)
            kept = cache[pages].reshape(len(pages), -1, 2 * kinds, width).swapaxes(1, 2)
            asked = asked.reshape(len(pages), kinds, -1, width)
            mixed = self._attend(asked, kept[:, :kinds], kept[:, kinds:], mask)
            mixed = mixed.reshape(len(pages), kinds, -1, heads // kinds * width).swapaxes(1, 2)
            made[row:stop] = mixed.reshape(stop - row, -1)
        return made

    def _attend_in_parts(self, query: Any, cache: Any, tables: Any, positions: Any) -> Any:
        """Attend with each query to its own keys, one part after another.

        This is the softmax of Milakov and Gimelshein ("Online normalizer calculation for softmax", 2018). A
        part without keys for a query changes nothing: the result is multiplied by 1, and 0 is added.
        """
        xp, config, size, per = self.xp, self.config, cache.shape[1], self._pages_of_part()
        kinds, rows = config.groups, len(query)
        asked = self._wide(query.reshape(rows, kinds, -1, config.width)) * config.width**-0.5
        seen, top = self._range(0, per * size), None
        total: Any = None
        mixed: Any = None
        for first in range(0, tables.shape[1], per):
            kept = self._wide(cache[tables[:, first : first + per]])
            kept = kept.reshape(rows, per * size, 2 * kinds, -1).swapaxes(1, 2)
            hidden = (seen + first * size > positions[:, None])[:, None, None]
            scores = xp.where(hidden, -np.inf, asked @ kept[:, :kinds].swapaxes(-1, -2))
            best = xp.amax(scores, axis=-1, keepdims=True)
            best = best if top is None else xp.maximum(best, top)
            shares = xp.exp(scores - best)
            summed, values = xp.sum(shares, axis=-1, keepdims=True), shares @ kept[:, kinds:]
            if top is None:
                total, mixed = summed, values
            else:
                older = xp.exp(top - best)
                total, mixed = total * older + summed, mixed * older + values
            top = best
        return self._like((mixed / total).reshape(rows, -1), query)

    def _array(self, numbers: npt.NDArray[np.int64]) -> Any:
        """Return numbers as an array of the library."""
        return numbers

    def _range(self, start: int, stop: int) -> Any:
        return np.arange(start, stop)

    def _wide(self, x: Any) -> Any:
        """Return an array in float32."""
        return x

    def _like(self, x: Any, other: Any) -> Any:
        """Return an array in the dtype of another array."""
        return x.astype(other.dtype)

    def _masked(self, logits: Any, masks: Any) -> Any:
        """Return logits with minus infinity for forbidden tokens."""
        if masks is None:
            return logits
        found, rows = logits.copy(), masks[:, 0]
        found[rows] = np.where(allowed_of(masks, logits.shape[1]), logits[rows], np.float32(-np.inf))
        return found

    def _choose(self, logits: Any, sampling: Any) -> Any:
        chosen = logits.argmax(axis=1)
        if sampling is not None:
            for row in np.flatnonzero(sampling[0] > 0):
                chosen[row] = _draw(logits[row], *sampling[:, row])
        return chosen

    def _mask(self, keys: int, own: Any) -> Any:
        """Return the keys that queries at the positions `own` see, for each query head of a key head."""
        own = own.repeat(self.config.heads // self.config.groups, axis=1)[:, None, :, None]
        return np.where(np.arange(keys) > own, np.float32(-np.inf), np.float32(0))

    def _empty_like(self, x: Any) -> Any:
        return np.empty_like(x)

    def _norm(self, name: str, x: Any) -> Any:
        squares = np.mean(x * x, axis=-1, keepdims=True)
        return x / np.sqrt(squares + np.float32(self.config.epsilon)) * self.weights[name]

    def _dense(self, name: str, x: Any) -> Any:
        if self.block == self.exact:
            return self._product(name, x)
        blocks = range(0, len(x), self.block)
        return self.xp.concatenate([self._product(name, x[first : first + self.block]) for first in blocks])

    def _product(self, name: str, x: Any) -> Any:
        return x @ self.weights[name].T

    def _silu(self, x: Any) -> Any:
        return x / (1 + np.exp(-x))

    def _attend(self, query: Any, keys: Any, values: Any, mask: Any) -> Any:
        scores = query @ keys.swapaxes(-1, -2)
        scores *= np.float32(query.shape[-1] ** -0.5)
        scores += mask
        scores -= scores.max(axis=-1, keepdims=True)
        shares = np.exp(scores, out=scores)
        shares /= shares.sum(axis=-1, keepdims=True)
        return shares @ values


def _draw(logits: Any, temperature: Any, top_p: Any, draw: Any) -> Any:
    """Draw one of the likeliest tokens with the share `top_p` (Holtzman et al., nucleus sampling, 2020)."""
    order = np.argsort(-logits, kind="stable")
    shares = np.exp((logits[order] - logits[order[0]]) / temperature, dtype=np.float64)
    sums = np.cumsum(shares)
    # A token is kept if the likelier tokens sum to less than `top_p`, so at least one token is kept.
    kept = max(int(np.count_nonzero(sums - shares < top_p * sums[-1])), 1)
    place = int(np.count_nonzero(sums <= draw * sums[kept - 1]))
    return order[min(place, kept - 1)]
