"""`examples/generate/serve.py`: asked by the interface's public client, under faults, and with bad input."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import cyclopts
import numpy as np
import pytest
from chosen import ROOT, SEARCHED
from kept_connections import Asked, check_kept_connections, check_next
from options import DEFAULTS, Options, keys_of
from serving import HELLO, RANDOM, Serving, chat, openai, post, serving, until
from text import InputError

pytestmark = [
    pytest.mark.examples,
    pytest.mark.skipif(sys.platform != "linux", reason="worker processes are for Linux"),
    pytest.mark.timeout(180),
    pytest.mark.xdist_group("generate"),
]

ROUND = re.compile(
    r"30 streams, 360 tokens, ([0-9]+) wrong, [0-9]+ unlike the undisturbed run by rounding alone, "
    r"([0-9]+) contexts lost, longest gap [0-9.]+ s"
)
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
# A stream that ends is an error to an `EventSource`: it would ask again, if it were not closed.
READ = """url => new Promise((resolve, reject) => {
    const source = new EventSource(url), found = [];
    setTimeout(() => reject(new Error("no end: " + found)), 20000);
    source.onmessage = event => found.push(event.data);
    source.onerror = () => { source.close(); resolve([...found, "ended"]); };
})"""


HALF = b'POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{"model":'


@pytest.fixture(scope="module")
def running() -> Iterator[Serving]:
    with serving(*RANDOM) as running:
        yield running
        assert running.pages() == 0
        # A signal lets open streams end.
        streams = [iter(chat(running.client(), max_tokens=60, stream=True)) for _ in range(3)]
        begun = [next(stream) for stream in streams]
        running.process.send_signal(signal.SIGTERM)
        assert running.process.stdout is not None
        assert running.process.stdout.readline().startswith("ending")
        for first, stream in zip(begun, streams, strict=True):
            parts = [first, *stream]
            assert len(parts) > 30
            assert parts[-1].choices[0].finish_reason == "length"
        running.close_clients()
        assert running.process.wait(40) == 0


@pytest.fixture(scope="module", autouse=True)
def late(running: Serving) -> Iterator[socket.socket]:
    """A client with an endless body. It waits during all tests: its time runs out meanwhile."""
    with running.send(HALF) as sock:
        yield sock


@pytest.fixture
def service(running: Serving) -> Iterator[Serving]:
    yield running
    running.close_clients()


def test_a_chat_is_the_same_whole_and_in_parts(service: Serving) -> None:
    client = service.client()
    assert [model.id for model in client.models.list().data] == ["random", "random-encoder"]
    for options in ({}, {"temperature": 1.1, "top_p": 0.8, "seed": 5}, {"temperature": 0.7, "seed": -1}):
        whole = chat(client, **options)
        assert whole.object == "chat.completion"
        [choice] = whole.choices
        assert (choice.finish_reason, choice.message.role) == ("length", "assistant")
        assert choice.message.content
        parts = list(chat(client, stream=True, stream_options={"include_usage": True}, **options))
        assert parts[0].choices[0].delta.role == "assistant"
        shown = "".join(part.choices[0].delta.content or "" for part in parts[:-1])
        assert shown == choice.message.content
        assert [part.choices[0].finish_reason for part in parts[:-1]] == [None] * (len(parts) - 2) + [
            "length"
        ]
        assert parts[-1].choices == []
        assert parts[-1].usage == whole.usage
        assert whole.usage.completion_tokens == 8
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + 8
        assert {part.id for part in parts} != {whole.id}
    assert len(list(chat(client, stream=True))[-1].choices) == 1


def test_a_text_continues(service: Serving) -> None:
    client = service.client()

    def complete(prompt: Any, **options: Any) -> Any:
        return client.completions.create(model="random", prompt=prompt, temperature=0, **options)

    whole = complete("ab", max_tokens=6)
    assert (whole.object, whole.choices[0].finish_reason) == ("text_completion", "length")
    stream = list(complete("ab", max_tokens=6, stream=True))
    assert "".join(part.choices[0].text for part in stream) == whole.choices[0].text
    # Bytes of a text are its tokens.
    tokens = whole.usage.prompt_tokens
    assert tokens == 2
    assert complete(["ab"], max_tokens=6).choices[0].text == whole.choices[0].text
    assert complete("ab").usage.completion_tokens == 16
    numbers = complete([100, 101, 49151], max_tokens=2)
    assert numbers.usage.prompt_tokens == 3


def test_a_stop_string_ends_an_answer(service: Serving) -> None:
    client = service.client()
    text = chat(client, max_tokens=20).choices[0].message.content
    stop = text[12:17]
    cut = text[: text.index(stop)]
    for given in (stop, [stop], ["never", stop]):
        whole = chat(client, max_tokens=20, stop=given)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == (cut, "stop")
        parts = list(chat(client, max_tokens=20, stop=given, stream=True))
        assert "".join(part.choices[0].delta.content or "" for part in parts) == cut
        assert parts[-1].choices[0].finish_reason == "stop"
        assert whole.usage.completion_tokens < 20
    until(lambda: service.pages() == 0)


def test_contents_may_be_parts_and_fields_may_ask_for_nothing(service: Serving) -> None:
    client = service.client()
    text = chat(client).choices[0].message.content
    said = [{"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]}]
    neutral: dict[str, Any] = {"n": 1, "logprobs": False, "presence_penalty": 0, "user": "me", "tools": []}
    assert chat(client, said, **neutral).choices[0].message.content == text
    given = {"model": "random", "messages": HELLO, "max_completion_tokens": 8, "temperature": 0}
    assert client.chat.completions.create(**given).choices[0].message.content == text


@pytest.mark.parametrize(
    ("options", "param", "says"),
    [
        ({"n": 2}, "n", "n is not supported here"),
        ({"tools": [{"type": "function"}]}, "tools", "each with a function that has a name"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "not supported"),
        ({"response_format": {"type": "xml"}}, "response_format", "with a json_schema of name"),
        ({"extra_body": {"guided_regex": "a"}}, "guided_regex", "guided_regex is not supported here"),
        ({"extra_body": {"prompt": "a"}}, "prompt", "prompt is not supported here"),
        ({"temperature": 2.5}, "temperature", "temperature must be a number from 0 to 2, got 2.5"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"top_p": -0.1}, "top_p", "top_p must be a number from 0 to 1"),
        ({"seed": 1.5}, "seed", "seed must be an integer"),
        ({"max_tokens": 0}, "max_tokens", "max_tokens must be an integer from 1"),
        ({"max_tokens": True}, "max_tokens", "max_tokens must be an integer from 1"),
        ({"max_tokens": 5000}, "messages", "at most 4800 tokens, got 24 and 5000"),
        ({"stop": ["a"] * 5}, "stop", "at most 4 stop strings"),
        ({"stop": [1]}, "stop", "stop must be a text"),
        ({"stream": "yes"}, "stream", "stream must be true or false"),
        ({"stream_options": {"x": 1}}, "stream_options", "only include_usage"),
        ({"messages": []}, "messages", "at least one message"),
        ({"messages": "Hello"}, "messages", "messages must be a list"),
        ({"messages": [5]}, "messages[0].role", "must be one of system, "),
        ({"messages": [*HELLO, {"role": "robot", "content": "x"}]}, "messages[1].role", "must be one of"),
        ({"messages": [{"role": "user", "content": None}]}, "messages[0].content", "must be a text"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "messages[0].content",
            "only text",
        ),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "messages", "at most 4800"),
    ],
)
def test_an_unservable_model_is_named(
    service: Serving, options: dict[str, Any], param: str, says: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(says)) as caught:
        chat(service.client(), **options)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"


@pytest.mark.parametrize("prompt", ["", [], [-1], [49152], ["a", ""], [[1, 2], []], {"a": 1}, 5, "\ud800"])
def test_invalid_prompts(service: Serving, prompt: Any) -> None:
    body = json.dumps({"model": "random", "prompt": prompt})
    status, answer = post(service, "/v1/completions", body)
    assert (status, answer["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a": NaN}'])
def test_invalid_bodies(service: Serving, body: bytes) -> None:
    status, answer = post(service, "/v1/chat/completions", body)
    assert status in {400, 404}
    assert answer["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("name", "param"), [("\ud800", "'\\ud800'"), ("", ""), ("x" * 100, "x" * 80), ("messages", "messages")]
)
def test_an_unsupported_field_is_named_before_others(service: Serving, name: str, param: str) -> None:
    status, answer = post(service, "/v1/completions", json.dumps({"model": "random", name: HELLO}))
    assert (status, answer["error"]["code"]) == (400, "unsupported_parameter")
    assert answer["error"]["param"] == param


def test_other_paths_methods_and_models(service: Serving) -> None:
    client = service.client()
    with pytest.raises(openai.NotFoundError, match="only 'random'") as caught:
        chat(client, model="gpt-4")
    assert (caught.value.code, caught.value.param) == ("model_not_found", "model")
    with pytest.raises(openai.NotFoundError, match="only 'random-encoder'"):
        client.embeddings.create(model="random", input="a")
    told = json.loads(service.get("/v1/chat/completions"))["error"]["message"]
    assert told == "Method Not Allowed: '/v1/chat/completions' takes POST"
    with service.send(b"HEAD /v1/completions?prompt=a HTTP/1.1\r\nHost: x\r\n\r\n") as sock:
        assert sock.recv(65536).startswith(b"HTTP/1.1 405 ")
    status, answer = post(service, "/v1/completions", b"x" * ((1 << 20) + 1))
    assert status == 413
    assert "must have at most" in answer["error"]["message"]
    assert post(service, "/v1/completions", b"x" * (1 << 20))[0] == 400


def test_fifty_at_once_get_the_same_as_each_alone(service: Serving) -> None:
    client = service.client()

    def ask(number: int) -> str:
        said = [{"role": "user", "content": f"{number} " * (1 + number % 7)}]
        options = {"max_tokens": 1 + number % 5, "seed": number, "temperature": 0.5 * (number % 2)}
        if number % 3:
            return str(chat(client, said, **options).choices[0].message.content)
        parts = chat(client, said, stream=True, **options)
        return "".join(part.choices[0].delta.content or "" for part in parts)

    alone = [ask(number) for number in range(50)]
    with ThreadPoolExecutor(50) as pool:
        assert list(pool.map(ask, range(50))) == alone
    assert "trio_accel_sequences" in service.get("/metrics")


def test_a_client_that_leaves_gives_its_pages_back(service: Serving) -> None:
    stream = chat(service.client(), max_tokens=4000, stream=True)
    next(iter(stream))
    assert service.pages() > 0
    stream.close()
    until(lambda: service.pages() == 0, 1.0)
    with service.send(
        b"GET /v1/completions?prompt=a&max_tokens=4000&stream=true HTTP/1.1\r\nHost: x\r\n\r\n"
    ) as sock:
        assert b" 200 " in sock.recv(65536)
    until(lambda: service.pages() == 0, 1.0)
    # Also a client that hangs up without a stream.
    with pytest.raises(openai.APITimeoutError):
        chat(service.client(timeout=0.3), max_tokens=4000)
    until(lambda: service.pages() == 0, 1.0)


def test_half_a_request_is_not_served(service: Serving, late: socket.socket) -> None:
    with service.send(HALF) as sock:
        sock.shutdown(socket.SHUT_WR)
        answer = b""
        with suppress(ConnectionResetError):
            answer = sock.recv(65536)
    assert b" 200 " not in answer
    # The body has five seconds.
    assert b" 408 " in late.recv(65536)
    assert chat(service.client()).usage.completion_tokens == 8
    assert service.pages() == 0


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_curl_sees_the_end(service: Serving) -> None:
    body = json.dumps({"model": "random", "messages": HELLO, "max_tokens": 3, "stream": True, "seed": 1})
    command = ("curl", "-sN", "-m", "20", "-d", body, f"{service.url}/v1/chat/completions")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    events = done.stdout.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    assert json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"] == "length"


def test_parameters_of_a_query_match_a_body(service: Serving) -> None:
    fields = {"prompt": "5 + é", "max_tokens": 6, "temperature": 1.5, "top_p": 0.9, "seed": -7, "user": "1"}
    _, posted = post(service, "/v1/completions", json.dumps({"model": "random", **fields}))
    got = json.loads(service.get(f"/v1/completions?{urlencode(fields)}"))
    assert got["choices"] == posted["choices"]
    events = service.get(f"/v1/completions?{urlencode({**fields, 'stream': 'true'})}")
    assert "data: [DONE]" in events
    assert service.get(f"/v1/completions?{urlencode({**fields, 'model': 'x'})}").count("model_not_found") == 1


@pytest.mark.parametrize(
    ("query", "param", "says"),
    [
        ("", "prompt", "prompt must be a text, tokens, or a list of at most 128 of them, got None"),
        ("prompt=", "prompt", "a prompt must have at least one token"),
        ("prompt=a&key=gold", "key", "key is not supported here"),
        ("prompt=a&n=2", "n", "n is not supported here"),
        ("prompt=a&stream=yes", "stream", "stream must be true or false, got 'yes'"),
        ("prompt=a&max_tokens=1e3", "max_tokens", "must be an integer"),
        ("prompt=a&temperature=hot", "temperature", "must be a number from 0 to 2, got 'hot'"),
        ("prompt=a&seed=" + "[" * 9000, "seed", "must be an integer"),
    ],
)
def test_queries_that_cannot_be_served(service: Serving, query: str, param: str, says: str) -> None:
    error = json.loads(service.get(f"/v1/completions?{query}"))["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert says in error["message"]


@pytest.mark.skipif(CHROMIUM is None, reason="Chromium is not installed")
def test_the_event_source_of_a_browser_sees_the_end(service: Serving) -> None:
    api: Any = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    query = urlencode({"prompt": "ab", "max_tokens": 6, "temperature": 0})
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        try:
            page = browser.new_page()
            page.goto(f"{service.url}/health")
            found = page.evaluate(READ, f"/v1/completions?{query}&stream=true")
        finally:
            browser.close()
    assert found[-2:] == ["[DONE]", "ended"]
    shown = "".join(json.loads(one)["choices"][0]["text"] for one in found[:-2])
    assert shown == json.loads(service.get(f"/v1/completions?{query}"))["choices"][0]["text"]


def test_it_is_ready(service: Serving) -> None:
    assert json.loads(service.get("/ready")) == {"status": "ready"}
    health = json.loads(service.get("/health"))
    assert (health["status"], health["faults"]) == ("alive", [])
    assert [device["generation"] for device in health["devices"].values()] == [1]


ASKED = json.dumps({"model": "random", "messages": HELLO, "max_tokens": 1})
KEPT = [
    Asked(200, "GET", "/v1/models"),
    Asked(404, "POST", "/v1/responses", ASKED),
    Asked(404, "POST", "/v1/responses", ASKED + " " * 100_000),
    Asked(404, "GET", "/v1/models/x"),
    Asked(405, "GET", "/v1/chat/completions"),
    Asked(405, "PUT", "/v1/chat/completions", ASKED),
    Asked(400, "POST", "/v1/chat/completions", "{"),
    Asked(404, "POST", "/v1/chat/completions", ASKED.replace("random", "x")),
    Asked(200, "GET", "/health"),
    Asked(200, "GET", "/v1/completions?prompt=a&max_tokens=1&stream=true"),
    Asked(200, "POST", "/v1/chat/completions", ASKED),
]


def test_kept_connections_serve_each_request(service: Serving) -> None:
    check_kept_connections(service.port, KEPT)
    # This one announces the end of its connection.
    check_next(service.port, Asked(413, "POST", "/v1/completions", "x" * ((1 << 20) + 5)), KEPT[0])
    client = service.client()
    for _ in range(30):
        assert client.models.list().data
        assert chat(client, max_tokens=1).usage.completion_tokens == 1


def rounds_rows_alike() -> bool:
    """Return whether a row of a product has the same bits among few rows and among many."""
    rng = np.random.default_rng(0)
    rows, weights = (rng.standard_normal(shape).astype(np.float32) for shape in ((64, 576), (576, 576)))
    whole = rows @ weights
    return all(np.array_equal(rows[:count] @ weights, whole[:count]) for count in range(4, 64))


@pytest.mark.skipif(
    not rounds_rows_alike(),
    reason="OpenBLAS's kernels without AVX-512 round a row by the number of rows beside it",
)
@pytest.mark.parametrize("forward", [(), pytest.param(("--operations",), marks=pytest.mark.slow)])
def test_kills_and_a_drain_change_no_token(forward: tuple[str, ...]) -> None:
    with serving(*RANDOM, "--faults", "1", *forward, GENERATE_KEYS="gold=3, free") as service:
        assert service.process.stdout is not None
        with pytest.raises(openai.AuthenticationError) as caught:
            chat(service.client("other"))
        assert caught.value.code == "invalid_api_key"
        texts = {chat(service.client("free"), max_tokens=12).choices[0].message.content}
        lost = rounds = 0
        while lost < 3 and rounds < 20:
            while (found := ROUND.match(service.process.stdout.readline())) is None:
                pass
            assert found[1] == "0"
            lost, rounds = lost + int(found[2]), rounds + 1
        assert lost >= 3
        # Workers are killed before the signal and, when the service has reported its end, after it.
        client = service.client("gold")
        streams = [iter(chat(client, max_tokens=40, stream=True)) for _ in range(3)]
        begun = [next(stream).choices[0].delta.content for stream in streams]
        kill_workers(service)
        service.process.send_signal(signal.SIGTERM)
        while not service.process.stdout.readline().startswith("ending"):
            pass
        kill_workers(service)
        for text, stream in zip(begun, streams, strict=True):
            parts = list(stream)
            assert parts[-1].choices[0].finish_reason == "length"
            texts.add(text + "".join(part.choices[0].delta.content or "" for part in parts))
        longest = max(texts, key=len)
        assert len(texts) == 2
        assert all(longest.startswith(text) for text in texts)
        assert service.process.wait(20) == 0


def test_a_killed_worker_is_one_line(tmp_path: Path) -> None:
    """As a user runs it: nothing configures logging."""
    with (tmp_path / "errors").open("w") as errors, serving(*RANDOM, stderr=errors) as service:
        text = chat(service.client()).choices[0].message.content
        for generation in (1, 2):
            [device] = json.loads(service.get("/health"))["devices"].values()
            assert device["generation"] == generation
            os.kill(device["pid"], signal.SIGKILL)
            assert chat(service.client()).choices[0].message.content == text
        service.process.send_signal(signal.SIGTERM)
        assert service.process.wait(20) == 0
    lines = (tmp_path / "errors").read_text().splitlines()
    losses = [
        re.match(r"trio_accel\.devices: device \S+ lost its context of generation (\d): ", line)
        for line in lines
    ]
    assert [loss and loss[1] for loss in losses] == ["1", "2"], lines


def kill_workers(service: Serving) -> None:
    """Kill the worker and the spare: a service process's forks."""
    [launcher] = children(service.process.pid)
    deadline = time.monotonic() + 60
    while not (workers := children(launcher)):  # a worker killed just now has no follower yet
        assert time.monotonic() < deadline
        time.sleep(0.01)
    for worker in workers:
        with suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


def children(process: int) -> list[int]:
    tasks = Path(f"/proc/{process}/task").iterdir()
    return [int(one) for task in tasks for one in (task / "children").read_text().split()]


# An empty file would let everybody in, and so would an empty key.
@pytest.mark.parametrize(
    ("keys", "says"),
    [
        (b"\n \n", "there must be at least one key"),
        (b"a\n=3\n", "keys must not be empty"),
        (b"a=b\n", "line 1 of the keys must be KEY or KEY=SHARE"),
        (b"a\n\nb=-1\n", "line 2 of the keys must be KEY or KEY=SHARE"),
        (b"gold=3\n\nfree\n gold = 2\n", "line 3 of the keys has the same key as line 1; remove one"),
        (b"gold\ngold\n", "line 2 of the keys has the same key as line 1; remove one"),
        (b"a=nan\n", "with a share from 1e-6 to 1e6"),
        (b"\xff\n", "only ASCII characters"),
    ],
)
def test_wrong_keys(tmp_path: Path, keys: bytes, says: str) -> None:
    (tmp_path / "keys").write_bytes(keys)
    with pytest.raises(InputError, match=re.escape(says)) as caught:
        keys_of(tmp_path / "keys")
    assert "gold" not in str(caught.value)


def test_keys_may_have_spaces_around_them(tmp_path: Path) -> None:
    (tmp_path / "keys").write_bytes(b" gold = 3 \r\n\r\nfree\n")
    assert keys_of(tmp_path / "keys") == {"gold": 3.0, "free": 1.0}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("port", value) for value in ("-1", "65536", "x")),
        *((name, value) for name in ("pages", "sequences", "layers") for value in ("0", "-5", "x")),
        *(("faults", value) for value in ("0", "-1", "nan", "inf")),
    ],
)
def test_an_option_out_of_range_is_named(name: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    app = cyclopts.App()

    @app.default
    def serve(given: Options = DEFAULTS) -> None:
        pytest.fail(f"{given} was taken")

    with pytest.raises(SystemExit) as ended:
        app([f"--{name}={value}"])
    assert ended.value.code != 0
    assert f"--{name}" in "".join(capsys.readouterr())


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--gguf", "missing.gguf"), "cannot read missing.gguf as a GGUF file"),
        (("--random-weights", "--layers", "1", "--backend", "bogus"), "bogus"),
        (("--random-weights", "--layers", "1", "--keys", "missing.txt"), "missing.txt"),
        (("--host", "192.0.2.1"), "cannot listen on 192.0.2.1, port 0: "),
    ],
)
def test_errors_a_user_can_correct(tmp_path: Path, options: tuple[str, ...], says: str) -> None:
    command = (sys.executable, str(ROOT / "examples" / "generate" / "serve.py"), "--port", "0", *options)
    environment = {**os.environ, "PYTHONPATH": SEARCHED}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
