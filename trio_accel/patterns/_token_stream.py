"""The tokens of a decoder, one by one."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import attrs
import outcome
import trio

from ._call import Model, as_callable, without_cancellation
from ._speculative import Generate, Generation

__all__ = ["TokenStream", "open_token_stream"]


class TokenStream:
    """An async iterator over tokens, made by `open_token_stream`."""

    def __init__(
        self, tokens: trio.MemoryReceiveChannel[int], replies: list[outcome.Outcome[Generation]]
    ) -> None:
        self._generation: Generation | None = None
        self._tokens = tokens
        self._replies = replies

    @property
    def generation(self) -> Generation:
        """The reply of the decoder.

        Raises:
            RuntimeError: The iteration has not come to its end.
        """
        if self._generation is None:
            raise RuntimeError("generation: the stream has not ended; iterate over it to its end")
        return self._generation

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> int:
        """The next token.

        Raises:
            Exception: What the decoder failed with, after the tokens before it.
        """
        try:
            return await self._tokens.receive()
        except trio.EndOfChannel:
            pass
        if self._replies:
            self._generation = self._replies.pop().unwrap()
        raise StopAsyncIteration


@asynccontextmanager
async def open_token_stream(
    decoder: Model[Generate, Generation], request: Generate, /
) -> AsyncGenerator[TokenStream, None]:
    """Ask a decoder, and iterate over the tokens as they become certain.

    The decoder is as fast as the reader: it waits with each token until that is read. At the end of the block
    the request is cancelled, if it has not ended.

    Args:
        decoder: A `SpeculativeDecoder`, or what leads to one. A request must not be sent to two of them.
        request: What to generate; its `stream` is replaced.
    """
    ask = as_callable(decoder)
    send, receive = trio.open_memory_channel[int](0)
    replies: list[outcome.Outcome[Generation]] = []
    failed: BaseException | None = None

    async def decode() -> None:
        async with send:
            try:
                replies.append(outcome.Value(await ask(attrs.evolve(request, stream=send))))
            except Exception as error:  # noqa: BLE001  # whatever it is, it is the reader's
                replies.append(outcome.Error(error))
            except BaseExceptionGroup as group:
                replies.append(outcome.Error(without_cancellation(group)))

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(decode)
            try:
                yield TokenStream(receive, replies)
            except (Exception, BaseExceptionGroup) as error:  # noqa: BLE001  # raised below, not in a group
                failed = error
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The reader's own error is above the cancellation of the decoder.
        if failed is None or group.split(trio.Cancelled)[1] is not None:
            raise
    if failed is not None:
        raise failed
