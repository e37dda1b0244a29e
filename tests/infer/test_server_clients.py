"""The server before an engine that says what it is told to: large and slow requests, clients that leave, keys, its command."""

import contextlib
import gc
import json
import os
import signal
import socket
import textwrap
import threading
import time
import warnings
from pathlib import Path

import httpx
import openai
import pytest

from dsv41 import cli
from infer.server import Limits, Service, listen
from tests.models import tiny_model
from tests.serving import CHAT, COMPLETION, HI, TWO_LAYERS, Scripted, eventually, serving

TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(scope="module")
def model():
    return tiny_model(**TWO_LAYERS)


def connected(url):
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def rest_of(wire):
    return b"".join(iter(lambda: wire.recv(65536), b""))


def talk(url, *parts, wait=0.0):
    """Everything that the server answers to raw bytes."""
    with connected(url) as wire:
        for part in parts:
            wire.sendall(part)
            time.sleep(wait)
        return rest_of(wire)


def test_large_and_slow_bodies(model):
    service = Service(Scripted(model), "said", Limits(arrival=0.4, body=4096))
    with serving(service) as url:
        large = json.dumps({"prompt": "a" * 6000})
        for content in (large, iter([large.encode()[:3000], large.encode()[3000:]])):
            got = httpx.post(f"{url}{COMPLETION}", content=content)
            assert got.status_code == 413 and "allowed is 4096" in got.json()["error"]["message"]
        # More than is read on: the answer comes, and the rest goes unread.
        with contextlib.suppress(httpx.WriteError, httpx.ReadError):
            assert httpx.post(f"{url}{COMPLETION}", content=b"x" * 2**22).status_code == 413
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n"
        for parts in ([head, b'{"prompt'], [head], [b"POST /v1/completions HTTP/1.1\r\nhost"], []):
            got = talk(url, *parts)
            assert got.startswith(b"HTTP/1.1 408") and b'{"error":' in got.replace(b" ", b"")
        # A head in pieces, in time, and a connection that is used again.
        asked = b"GET /health HTTP/1.1\r\nhost: x\r\n"
        assert talk(url, asked[:9], asked[9:] + b"connection: close\r\n\r\n", wait=0.01).startswith(b"HTTP/1.1 200")
        with connected(url) as wire:
            wire.sendall(asked + b"\r\n")
            got = b""
            while not got.endswith(b"}"):
                got += wire.recv(65536)
            wire.sendall(asked[:9])
            assert got.startswith(b"HTTP/1.1 200") and rest_of(wire).startswith(b"HTTP/1.1 408")
        assert talk(url, b"NONSENSE\r\n\r\n").startswith(b"HTTP/1.1 400")
        assert httpx.get(f"{url}/health").status_code == 200 and service._running == 0


@pytest.fixture
def scripted(model):
    engine = Scripted(model)
    service = Service(engine, "said", Limits(requests=2, seconds=60.0, arrival=5.0))
    with serving(service) as url:
        service.url = url
        yield service


def chat(scripted, script, **options):
    """The one choice of a chat, and that its stream says the same."""
    scripted.engine.script = script
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        ask = {"model": "said", "messages": HI, **options}
        choice = client.chat.completions.create(**ask).choices[0]
        deltas = [chunk.choices[0] for chunk in client.chat.completions.create(**ask, stream=True)]
    join = lambda name: "".join(getattr(one.delta, name, None) or "" for one in deltas)  # noqa: E731
    message = choice.message
    calls = [call for one in deltas for call in one.delta.tool_calls or ()]
    assert (join("content"), join("reasoning_content")) == (message.content, getattr(message, "reasoning_content", ""))
    assert [call.function.model_dump() for call in calls] == [c.function.model_dump() for c in message.tool_calls or ()]
    assert deltas[-1].finish_reason == choice.finish_reason
    return choice


def test_thinking_and_tools(scripted):
    value = '<｜DSML｜ parameter name="x" string="false">[1, "é"]</｜DSML｜ parameter>'
    call = f'<｜DSML｜ invoke name="add">\n{value}\n</｜DSML｜ invoke>\n'
    said = f"why</think>sum\n\n<｜DSML｜ calls>\n{call}{call}</｜DSML｜ calls>"
    choice = chat(scripted, said, tools=TOOLS, reasoning_effort="low")
    assert (choice.message.reasoning_content, choice.message.content, choice.finish_reason) == ("why", "sum", "tool_calls")
    calls = choice.message.tool_calls
    assert [(one.type, one.function.name, json.loads(one.function.arguments)) for one in calls] == [
        ("function", "add", {"x": [1, "é"]})
    ] * 2
    assert len({one.id for one in calls}) == 2
    text = scripted.engine.model.tokenizer.decode(scripted.engine.asked[-1].ids)
    assert (
        "Reasoning Effort: 50 " in text
        and '{"name": "add", "parameters": {"type": "object"}}' in text
        and text.endswith("<think>")
    )
    # Malformed, cut off, or not asked for: it is content.
    broken = said.removeprefix("why</think>").replace('"é"]', "")
    assert chat(scripted, broken, tools=TOOLS).message.content == broken
    assert chat(scripted, broken[:60], tools=TOOLS).message.content == broken[:60]
    for options in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        plain = chat(scripted, said, **options)
        assert (plain.message.content, plain.message.tool_calls, plain.finish_reason) == (said, None, "stop")
    assert not hasattr(plain.message, "reasoning_content")
    for asked in ({"thinking": {"type": "enabled"}}, {"thinking": True}, {"thinking": True, "reasoning_effort": 75}):
        assert chat(scripted, "a</think>b", extra_body=asked).message.content == "b"
        assert "Reasoning Effort: 75 " in scripted.engine.model.tokenizer.decode(scripted.engine.asked[-1].ids)
    for asked in ({"thinking": {"type": "disabled"}}, {"reasoning_effort": "none"}, {"thinking": False, "reasoning_effort": 1}):
        assert chat(scripted, "a</think>b", extra_body=asked).message.content == "a</think>b"
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}}
    assert chat(scripted, "[]", response_format=form).message.content == "[]"
    assert "## Response Format" in scripted.engine.model.tokenizer.decode(scripted.engine.asked[-1].ids)
    usage = httpx.post(f"{scripted.url}{CHAT}", json={"messages": HI, "n": 3}).json()["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["prompt_tokens_details"]) == (7, 6, {"cached_tokens": 4})


def test_too_many_too_long_and_gone(scripted):
    engine, url = scripted.engine, scripted.url
    engine.go.clear()
    ask = {"prompt": "a", "stream": True, "n": 2}
    with contextlib.ExitStack() as stack:
        for body in (ask, {**ask, "stream": False}):
            wire = stack.enter_context(contextlib.closing(socket.create_connection(url.removeprefix("http://").split(":"))))
            text = json.dumps(body).encode()
            wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(text), text))
        eventually(lambda: len(engine.jobs) == 4)
        busy = httpx.post(f"{url}{COMPLETION}", json=ask)
        assert (
            busy.status_code == 429 and busy.json()["error"]["type"] == "rate_limit_error" and busy.headers["retry-after"] == "1"
        )
        assert (
            httpx.get(f"{url}/health").status_code == 200
            and "dsv41_http_requests_running 2.0" in httpx.get(f"{url}/metrics").text
        )
    # Both have left.
    eventually(lambda: not engine.jobs and scripted._running == 0)
    assert sorted(engine.aborted) == [1, 2, 3, 4]
    scripted.limits = Limits(seconds=0.2)
    for stream in (False, True):
        late = httpx.post(f"{url}{COMPLETION}", json={"prompt": "a", "stream": stream})
        assert late.status_code == 504 and "0.2 s" in late.json()["error"]["message"]
    eventually(lambda: not engine.jobs)
    engine.go.set()
    assert httpx.post(f"{url}{COMPLETION}", json={"prompt": "a"}).json()["choices"][0]["text"] == "hello"


def test_a_client_that_does_not_read_holds_up_no_other(scripted):
    engine, url = scripted.engine, scripted.url
    engine.script = "hello" * 20_000
    scripted.limits = Limits(seconds=1.0, arrival=0.2)
    with contextlib.closing(socket.socket()) as wire:
        wire.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        host, port = url.removeprefix("http://").split(":")
        wire.connect((host, int(port)))
        body = b'{"prompt": "a", "stream": true}'
        wire.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body))
        eventually(lambda: engine.jobs)
        assert httpx.get(f"{url}/health").status_code == 200
        # Its time is up, and what it was told last cannot be sent: it is let go, and its request aborted.
        eventually(lambda: not engine.jobs and scripted._running == 0)
        engine.script = "hello"
        assert httpx.post(f"{url}{COMPLETION}", json={"prompt": "a"}).json()["choices"][0]["text"] == "hello"


def test_a_stream_that_stops_says_why(scripted):
    engine = scripted.engine
    engine.finish = "error"
    with openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.InternalServerError, match="no luck"):
            client.completions.create(model="said", prompt="a")
        heard = []
        stream = client.completions.create(model="said", prompt="a", stream=True)
        with pytest.raises(openai.APIError, match="no luck"):
            heard.extend(chunk.choices[0].text for chunk in stream)
        assert heard == ["hel"]
        # Time is up in the middle.
        engine.finish, engine.script = "stop", "hello" * 10_000
        scripted.limits = Limits(seconds=0.5)
        with pytest.raises(openai.APIError, match=r"0\.5 s"):
            list(client.completions.create(model="said", prompt="a", stream=True))
        eventually(lambda: not engine.jobs)
        # And the engine's own end.
        engine.go.clear()
        scripted.limits, engine.script = Limits(), "hello"
        stream = threading.Thread(target=lambda: heard.append(httpx.post(f"{scripted.url}{CHAT}", json={"messages": HI})))
        stream.start()
        eventually(lambda: engine.jobs)
        engine.broken = True
        engine.go.set()
        stream.join()
        assert heard[-1].status_code == 503 and "out of luck" in heard[-1].json()["error"]["message"]
        health = httpx.get(f"{scripted.url}/health")
        assert health.status_code == 503 and "out of luck" in health.json()["error"]["message"]


def test_the_example_of_the_docs(scripted, capsys):
    scripted.api.name = "toy"
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text(encoding="utf-8")
    example = textwrap.dedent(page[page.index("    from openai") : page.index("| path |")])
    assert "from openai" in example and "http://127.0.0.1:8000" in example
    with warnings.catch_warnings():
        # The example leaves its client open.
        warnings.simplefilter("ignore", ResourceWarning)
        exec(example.replace("http://127.0.0.1:8000", scripted.url), {})
        gc.collect()
    assert capsys.readouterr().out == "hello\nhello"


def test_the_key_and_not_ready(model):
    engine = Scripted(model)
    engine.warm.clear()
    service = Service(engine, "said", key="sëcret")
    with serving(service, wait=False) as url:
        key = {"Authorization": "Bearer sëcret".encode()}
        assert httpx.get(f"{url}/health").status_code == 503
        early = httpx.post(f"{url}{CHAT}", json={"messages": HI}, headers=key)
        assert early.status_code == 503 and "compiled" in early.json()["error"]["message"]
        engine.warm.set()
        eventually(lambda: httpx.get(f"{url}/health").status_code == 200)
        for headers in ({}, {"Authorization": "Bearer secret"}, {"Authorization": "sëcret".encode()}):
            for path in (CHAT, COMPLETION, "/v1/models"):
                wrong = httpx.get(f"{url}{path}", headers=headers)
                assert wrong.status_code == 401 and wrong.json()["error"]["code"] == "invalid_api_key"
        assert httpx.get(f"{url}/v1/models", headers=key).status_code == 200
        assert httpx.get(f"{url}/metrics").status_code == 200


def test_command(capsys, monkeypatch, tmp_path, model):
    """Bad input ends with one line; a server ends with Ctrl-C."""

    def fails(*words):
        assert cli.run(["serve", "--checkpoint", str(tmp_path), *words]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        return err

    assert "no checkpoint" in fails("--port", "0")
    assert "--port: found 70000, allowed is 0" in fails("--port", "70000")
    assert "--timeout: found 0.0, allowed is above 0" in fails("--timeout", "0")
    for size in ("nan", "inf", "-1", "0"):
        assert f"--prefix-gib: found {float(size)}, allowed is a number above 0" in fails(f"--prefix-gib={size}")
    with listen("127.0.0.1", 0) as taken:
        assert "Address already in use" in fails("--port", str(taken.getsockname()[1]))
    assert "--port: cannot listen on nowhere.invalid" in fails("--host", "nowhere.invalid")
    monkeypatch.setattr("infer.model.load_model", lambda run, mesh: model)
    file = tmp_path / "a.db"
    for words in (["--slots", "0"], ["--pages", "0"]):
        assert f"{words[0]}: found 0" in fails("--port", "0", "--prefix-cache", str(file), *words)
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("infer.engine.Engine", Scripted)
    monkeypatch.setenv("DSV41_API_KEY", "k")
    with listen("127.0.0.1", 0) as free:
        port = free.getsockname()[1]
    heard = []

    def ask():
        try:
            with contextlib.suppress(httpx.TransportError), httpx.Client() as http:
                eventually(lambda: _ready(http, port))
            with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="k") as client:
                heard.append(client.completions.create(model="run", prompt="a").choices[0].text)
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    (tmp_path / "folder").mkdir()
    assert "--prefix-cache: found a folder" in fails("--port", "0", "--prefix-cache", str(tmp_path / "folder"))
    thread = threading.Thread(target=ask)
    thread.start()
    assert cli.run(["serve", "--checkpoint", str(tmp_path / "run"), "--port", str(port), "--prefix-cache", str(file)]) == 130
    thread.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.db", "folder"]
    assert heard == ["hello"]
    assert capsys.readouterr().out == f"serving run at http://127.0.0.1:{port}/v1; compiling\nready\n"


def _ready(http, port):
    with contextlib.suppress(httpx.TransportError):
        return http.get(f"http://127.0.0.1:{port}/health").status_code == 200
    return False
