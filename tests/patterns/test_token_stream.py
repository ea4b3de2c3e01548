"""The tokens of a decoder as they become certain."""

from __future__ import annotations

import pytest
import trio
from language_models import Chain, Rows, random_chain
from trio.testing import wait_all_tasks_blocked

import trio_accel as ta
from trio_accel.patterns import Call, Generate, Generation, Score, SpeculativeDecoder, open_token_stream

Decoder = ta.Ref[SpeculativeDecoder]


@pytest.fixture
def verifier() -> Chain:
    return random_chain(2, 8)


@pytest.fixture
async def decoder(system: ta.System, verifier: Chain) -> Decoder:
    return await system.spawn(SpeculativeDecoder, random_chain(1, 8), verifier, lookahead=3)


async def test_the_stream_has_the_tokens_of_the_reply(decoder: Decoder) -> None:
    request = Generate((0,), seed=3, max_tokens=40)
    whole: Generation = await decoder.ask(Call(request))
    async with open_token_stream(decoder, request) as stream:
        with pytest.raises(RuntimeError, match="has not ended"):
            _ = stream.generation
        tokens = [token async for token in stream]
    assert tuple(tokens) == whole.tokens
    assert stream.generation == whole


async def test_tokens_come_before_the_next_are_computed(decoder: Decoder, verifier: Chain) -> None:
    async with open_token_stream(decoder, Generate((0,), seed=3, max_tokens=400)) as stream:
        seen = 0
        while seen < 50:
            await stream.__anext__()
            seen += 1
            await wait_all_tasks_blocked()
            # It waits with the rest of a round, at most 4 tokens, or has verified one round more.
            assert seen <= len(verifier.calls[-1].tokens) + 1
            assert len(verifier.calls[-1].tokens) <= seen + 1 + 4
    assert len(verifier.calls) < 60


async def test_a_reader_that_leaves_ends_the_request(
    system: ta.System, decoder: Decoder, verifier: Chain
) -> None:
    async with open_token_stream(decoder, Generate((0,), max_tokens=10**9)) as stream:
        async for _ in stream:
            break
    await wait_all_tasks_blocked()
    calls = len(verifier.calls)
    await wait_all_tasks_blocked()
    assert len(verifier.calls) == calls
    assert system.tree().find(decoder.path).deferred == 0


async def test_what_the_reader_raises_is_no_group(decoder: Decoder) -> None:
    with pytest.raises(KeyError):
        async with open_token_stream(decoder, Generate((0,))):
            raise KeyError


async def test_an_error_of_a_model_comes_after_the_tokens_before_it(system: ta.System) -> None:
    chain = random_chain(2, 8)

    async def fails_later(score: Score) -> Rows:
        if len(score.tokens) > 10:
            raise OSError("gone")
        return await chain(score)

    decoder = await system.spawn(SpeculativeDecoder, fails_later, fails_later)
    tokens: list[int] = []

    async def read() -> None:
        async with open_token_stream(decoder, Generate((0,), seed=1)) as stream:
            async for token in stream:
                tokens.append(token)  # noqa: PERF401  # those before the error count

    with pytest.raises(OSError, match="gone"):
        await read()
    assert len(tokens) in range(6, 11)


async def test_a_stream_that_was_closed_is_the_askers_error(decoder: Decoder) -> None:
    send, receive = trio.open_memory_channel[int](0)
    receive.close()
    with send, pytest.raises(trio.BrokenResourceError):
        await decoder.ask(Call(Generate((0,), stream=send)))


async def test_a_cancelled_reader_leaves(decoder: Decoder) -> None:
    with trio.CancelScope() as scope:
        async with open_token_stream(decoder, Generate((0,), max_tokens=10**9)) as stream:
            async for _ in stream:
                scope.cancel()
    assert scope.cancelled_caught


async def test_what_is_no_model_is_refused() -> None:
    with pytest.raises(TypeError, match="a model is"):
        async with open_token_stream(3, Generate((0,))):  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
            pass
