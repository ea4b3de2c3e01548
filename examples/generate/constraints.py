"""Texts of a required form, such as JSON with a schema: the allowed next tokens.

`llguidance` (Microsoft, 2025) finds these tokens. Strangers send the schemas, so `schemas.py` and the limits
of `llguidance` bound their cost.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from threading import Lock
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
import numpy.typing as npt
from schemas import OPTIONS, ConstraintError, checked_schema
from text import Loaded, Text

if TYPE_CHECKING:
    from llguidance import LLMatcher

__all__ = ["LIMITS", "OBJECT", "Constraint", "ConstraintError", "Grammar", "Grammars", "NoCompilerError"]

OBJECT = {"type": "object"}
"""The schema of any JSON object."""
LIMITS: Any = {
    "max_grammar_size": 5_000,
    "initial_lexer_fuel": 40_000,
    "step_lexer_fuel": 20_000,
    "step_max_items": 3_000,
    "max_lexer_states": 10_000,
}
"""The maximum work for a grammar and for a token, in units of `llguidance`. A lexer state takes 2 kB."""
_MAX_KEPT = 64
# The number of tokens to try before a grammar is accepted, because some grammars become too large only after
# their first letters.
_TRIED = 4


class NoCompilerError(ConstraintError):
    """The package `llguidance` is missing, so any text has a free form."""


class Constraint:
    """The form of one text. It consumes each token once, in order.

    Args:
        matcher: An `LLMatcher` for this text only.
        words: The number of tokens in the vocabulary.
    """

    def __init__(self, matcher: LLMatcher, words: int) -> None:
        self._matcher, self._words, self._seen = matcher, words, 0

    def mask(self, tokens: Sequence[int]) -> npt.NDArray[np.int32]:
        """Return a bit for each token, 32 in each integer: 1 if the token is allowed next.

        Args:
            tokens: The text so far: the tokens of the last call, and perhaps more.

        Raises:
            ConstraintError: The grammar has become too large.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        self._matcher.consume_tokens(list(tokens[self._seen :]))
        self._seen = len(tokens)
        mask = allocate_token_bitmask(1, self._words)
        fill_next_token_bitmask(self._matcher, mask)
        if self._matcher.is_error():
            raise ConstraintError(_reason(self._matcher))
        row: npt.NDArray[np.int32] = mask[0]
        return row


@attrs.frozen(eq=False)
class Grammar:
    """A compiled form of texts."""

    _matcher: LLMatcher
    _words: int

    def begin(self) -> Constraint:
        """Begin a text."""
        return Constraint(self._matcher.deep_copy(), self._words)


class Grammars:
    """A compiler of a model's grammars, with a cache. Creating an instance takes half a second.

    Without the package `llguidance`, all grammars raise `NoCompilerError`.

    Args:
        loaded: The model.
    """

    def __init__(self, loaded: Loaded) -> None:
        self._words = loaded.config.words
        self._is_missing = find_spec("llguidance") is None
        if not self._is_missing:
            self._open(loaded.text)
        self._kept = OrderedDict[str, Grammar]()
        self._lock = Lock()

    def _open(self, text: Text) -> None:
        from llguidance import LLMatcher, LLParserLimits, LLTokenizer

        self._matcher = LLMatcher
        self._limits = LLParserLimits(**LIMITS, verbose_errors=False)
        self._tokenizer = LLTokenizer(
            text.tokenizer.to_str(),
            n_vocab=self._words,
            eos_token=list(text.ends),
            slices=LLTokenizer.json_slices(),
        )

    def check(self) -> None:
        """Raise `NoCompilerError` if grammars are not available."""
        if self._is_missing:
            raise NoCompilerError(
                "the package llguidance is missing: pip install '.[generate]' in a checkout"
            )

    def json(self, schema: Mapping[str, Any]) -> Grammar:
        """Return the grammar of JSON with a schema, without spaces between its tokens. Blocking.

        Raises:
            ConstraintError: The schema is wrong, too large, endless, or uses an unknown keyword.
            NoCompilerError: See `check`.
        """
        self.check()
        source = checked_schema(schema)
        try:
            grammar = self._matcher.grammar_from_json_schema(source, overrides=OPTIONS)
        except ValueError as error:  # such as an integer too large for a float
            raise ConstraintError(f"{error!s:.200}") from None
        return self.compiled(grammar)

    def lark(self, source: str) -> Grammar:
        """Return the grammar of a source in Lark syntax. Each `%json` in it must be a `checked_schema`."""
        self.check()
        return self.compiled(self._matcher.grammar_from_lark(source))

    def compiled(self, source: str) -> Grammar:
        """Compile a grammar, unless it is in the cache. Blocking."""
        with self._lock:
            if found := self._kept.get(source):
                self._kept.move_to_end(source)
                return found
        matcher = self._matcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if matcher.is_error():
            raise ConstraintError(_reason(matcher))
        made = Grammar(matcher, self._words)
        self._try(made)
        with self._lock:
            self._kept[source] = made
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return made

    def _try(self, grammar: Grammar) -> None:
        constraint, tokens = grammar.begin(), list[int]()
        while len(tokens) < _TRIED:
            allowed = np.unpackbits(constraint.mask(tokens).view(np.uint8), bitorder="little")
            token = int(allowed.argmax())
            if token in self._tokenizer.eos_tokens:
                return
            tokens.append(token)


def _reason(matcher: LLMatcher) -> str:
    """Return why a matcher cannot continue, without the grammar that follows in its message."""
    said = matcher.get_error().replace("<non-verbose/>", "").partition("<backtrace>")[0]
    return " ".join(said.split())[:200]
