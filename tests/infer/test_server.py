"""The server on loopback, before a real engine: the official client's calls, wrong requests, many, and prefixes."""

import asyncio
import json
import threading

import httpx
import openai
import pytest

from dsv41.numerics import Policy
from infer.allocator import PageAllocator
from infer.chat import ChatTokens, render
from infer.engine import Engine
from infer.prefix import PrefixCache
from infer.requests import Request
from infer.reuse import Reuse
from infer.sampling import Sampling
from infer.server import Limits, Service
from infer.store import BlockStore
from infer.windows import WindowPool
from tests.models import tiny_model
from tests.serving import CHAT, COMPLETION, HI, TWO_LAYERS, serving


@pytest.fixture(scope="module")
def model():
    return tiny_model(**TWO_LAYERS)


@pytest.fixture(scope="module")
def service(model):
    engine = Engine(model, slots=4, longest=128, page=128, pages=12, chunks=(16,), block=8)
    return Service(engine, "tiny", Limits(body=4096))


@pytest.fixture(scope="module")
def url(service):
    with serving(service) as url:
        yield url


@pytest.fixture(scope="module")
def client(url):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        yield client


def alone(service, ids, **rule):
    """The text that the engine gives a request, asked without HTTP."""
    said, done = [], threading.Event()

    def hear(event):
        said.append(event)
        if event.finish:
            done.set()

    service.engine.submit(Request(ids, Sampling(**rule)), hear)
    assert done.wait(60)
    return "".join(event.text for event in said), [id for event in said for id in event.ids]


def test_completions(service, client):
    encode = service.engine.model.encode
    ids = encode("def f1(a")
    want, new = alone(service, ids, max_new_tokens=20)
    ask = lambda prompt, **options: client.completions.create(model="tiny", prompt=prompt, **{"temperature": 0} | options)  # noqa: E731
    got = ask("def f1(a", max_tokens=20)
    assert (got.object, got.model, got.choices[0].text, got.choices[0].finish_reason) == (
        "text_completion",
        "tiny",
        want,
        "length",
    )
    assert got.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": len(ids),
        "completion_tokens": 20,
        "total_tokens": len(ids) + 20,
    }
    assert got.usage.prompt_tokens_details.cached_tokens == 0
    assert ask(ids, max_tokens=20).choices[0].text == want
    assert ask("def f1(a").usage.completion_tokens == 16 and ask("x", max_tokens=0).choices[0].text == ""
    # Several prompts, several choices each, echo.
    many = ask(["def f1(a", encode("b + ")], max_tokens=9, n=2, echo=True)
    assert [choice.index for choice in many.choices] == [0, 1, 2, 3]
    assert many.choices[0].text == many.choices[1].text == "def f1(a" + alone(service, ids, max_new_tokens=9)[0]
    assert many.choices[2].text.startswith("<bos>b + ") and many.usage.prompt_tokens == len(ids) + len(encode("b + "))
    assert many.usage.completion_tokens == 36
    # A stop string is no part of the text, and a stop id ends it.
    cut = next(n for n in range(4, 15) if want[n : n + 2] not in want[: n + 1])
    stopped = ask("def f1(a", max_tokens=20, stop=[want[cut : cut + 2], "\0"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (want[:cut], "stop")
    by_id = ask("def f1(a", max_tokens=20, extra_body={"stop_token_ids": [new[3]]})
    assert by_id.usage.completion_tokens == new.index(new[3]) and by_id.choices[0].finish_reason == "stop"


@pytest.mark.pitfall("O4")
def test_seeds(client):
    ask = lambda **options: [choice.text for choice in client.completions.create(model="tiny", prompt="a", **options).choices]  # noqa: E731
    one = ask(seed=3, n=3, max_tokens=12)
    assert one == ask(seed=3, n=3, max_tokens=12) and len(set(one)) == 3 and ask(seed=3, max_tokens=12) == one[:1]
    nothing = {"repetition_penalty": 1.0, "frequency_penalty": 0, "logit_bias": {}}
    assert ask(seed=3, max_tokens=12, extra_body=nothing) == one[:1]
    assert ask(seed=3 + 2**32, max_tokens=12) == one[:1] and ask(seed=-5, max_tokens=3)
    assert len({ask(max_tokens=12)[0] for _ in range(4)}) > 1


def test_logprobs(service, client):
    _, new = alone(service, service.engine.model.encode("def"), max_new_tokens=12)
    ask = lambda **options: client.completions.create(model="tiny", prompt="def", max_tokens=12, temperature=0, **options)  # noqa: E731
    told = ask(logprobs=2).choices[0].logprobs
    assert len(told.tokens) == len(told.token_logprobs) == len(told.top_logprobs) == len(told.text_offset) == len(new)
    # Greedy: the one taken is the likeliest.
    assert told.token_logprobs == [max(top.values()) for top in told.top_logprobs] and all(
        len(top) == 2 for top in told.top_logprobs
    )
    assert ask(logprobs=0).choices[0].logprobs.token_logprobs == told.token_logprobs
    streamed = [chunk.choices[0].logprobs for chunk in ask(logprobs=2, stream=True) if chunk.choices[0].logprobs]
    assert [token for one in streamed for token in one.tokens] == told.tokens
    assert [offset for one in streamed for offset in one.text_offset] == told.text_offset
    options = {"model": "tiny", "messages": HI, "temperature": 0, "max_tokens": 8, "logprobs": True, "top_logprobs": 3}
    content = client.chat.completions.create(**options).choices[0].logprobs.content
    assert len(content) == 8 and all(len(token.top_logprobs) == 3 for token in content)
    assert all(token.logprob == token.top_logprobs[0].logprob and token.bytes == token.top_logprobs[0].bytes for token in content)
    chunks = client.chat.completions.create(**options, stream=True)
    told = [token for chunk in chunks if chunk.choices[0].logprobs for token in chunk.choices[0].logprobs.content]
    assert [token.model_dump() for token in told] == [token.model_dump() for token in content]


@pytest.mark.pitfall("J4")
def test_streams_are_the_whole_in_pieces(client):
    options = {"model": "tiny", "temperature": 0.9, "seed": 1, "max_tokens": 30, "n": 2}
    whole = client.completions.create(prompt="é🙂", **options)
    chunks = list(client.completions.create(prompt="é🙂", stream=True, stream_options={"include_usage": True}, **options))
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage and chunks[0].usage is None
    assert len({chunk.id for chunk in chunks}) == 1 and len(chunks) > 5
    for n, choice in enumerate(whole.choices):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == n]
        assert "".join(one.text for one in mine) == choice.text
        assert [one.finish_reason for one in mine] == [None] * (len(mine) - 1) + [choice.finish_reason]
    whole = client.chat.completions.create(messages=HI, **options)
    chunks = list(client.chat.completions.create(messages=HI, stream=True, **options))
    assert chunks[0].choices[0].delta.role == "assistant" and all(len(chunk.choices) == 1 for chunk in chunks)
    for n, choice in enumerate(whole.choices):
        mine = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == n]
        assert "".join(one.delta.content or "" for one in mine) == choice.message.content
        assert mine[-1].finish_reason == choice.finish_reason == "length"


def test_chat_asks_for_the_rendered_prompt(service, client):
    config = service.engine.model.config
    ids = ChatTokens(service.engine.model.tokenizer, config.bos_token_id, config.eos_token_id).ids(render(HI))
    got = client.chat.completions.create(model="tiny", messages=HI, temperature=0, max_completion_tokens=9)
    assert got.choices[0].message.content == alone(service, ids, max_new_tokens=9)[0] and got.usage.prompt_tokens == len(ids)
    assert got.choices[0].message.role == "assistant" and got.choices[0].message.tool_calls is None


def test_models_health_and_metrics(service, url, client):
    assert [model.id for model in client.models.list()] == ["tiny"] and client.models.retrieve("tiny").owned_by == "dsv41"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")
    assert httpx.get(f"{url}/health").json() == {"status": "ok"}
    before = service.engine.metrics()
    client.completions.create(model="tiny", prompt="abc", max_tokens=4, temperature=0)
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    told = dict(line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    assert float(told["dsv41_new_tokens_total"]) >= before.new_tokens + 4 and told["dsv41_ready"] == "1.0"
    assert (
        float(told["dsv41_time_to_first_token_seconds_count"]) >= 1 and told["dsv41_free_pages"] == told["dsv41_pages"] == "12.0"
    )
    assert float(told['dsv41_http_responses_total{path="/v1/completions",status="200"}']) >= 1


@pytest.mark.parametrize(
    ("path", "body", "status", "said"),
    [
        (COMPLETION, {}, 400, "prompt: found none"),
        (COMPLETION, {"prompt": None}, 400, "prompt: found none"),
        (COMPLETION, {"prompt": ""}, 400, "prompt: found ''"),
        (COMPLETION, {"prompt": []}, 400, "prompt: found none"),
        (COMPLETION, {"prompt": [3, "a"]}, 400, "prompt: found 3"),
        (COMPLETION, {"prompt": [3, 5000]}, 400, "prompt: found token id 5000"),
        (COMPLETION, {"prompt": [10**30]}, 400, "prompt: found token id"),
        (COMPLETION, {"prompt": ["a"] * 129}, 400, "prompt: found 129"),
        (COMPLETION, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens: found -1, allowed is 0 or more"),
        (COMPLETION, {"prompt": "a", "max_tokens": 200}, 400, "tokens and max_tokens 200, allowed is 128 together"),
        (COMPLETION, {"prompt": "a", "max_tokens": "9"}, 400, "max_tokens: found '9', allowed is a whole number"),
        (COMPLETION, {"prompt": "a", "max_tokens": True}, 400, "max_tokens: found True"),
        (COMPLETION, {"prompt": "a", "temperature": -1}, 400, "temperature: found -1"),
        (COMPLETION, {"prompt": "a", "top_p": 0}, 400, "top_p: found 0"),
        (COMPLETION, {"prompt": "a", "n": 0}, 400, "n: found 0, allowed is 1 to 128"),
        (COMPLETION, {"prompt": "a", "logprobs": 21}, 400, "logprobs: found 21, allowed is 0 to 20"),
        (COMPLETION, {"prompt": "a", "logprobs": 1, "echo": True}, 400, "logprobs: found with echo"),
        (COMPLETION, {"prompt": "a", "stop": ""}, 400, "stop: found ''"),
        (COMPLETION, {"prompt": "a", "stop": ["x"] * 17}, 400, "stop: found"),
        (COMPLETION, {"prompt": "a", "stop_token_ids": [-1]}, 400, "stop_token_ids: found -1"),
        (COMPLETION, {"prompt": "a", "stop_token_ids": [5000]}, 400, "stop_token_ids: found token id 5000, allowed is 0 to"),
        (COMPLETION, {"prompt": "a", "stop_token_ids": [10**30]}, 400, "stop_token_ids: found token id 1000"),
        (COMPLETION, {"prompt": "a", "stop_token_ids": [*range(17)]}, 400, "stop_token_ids: found 17 token ids"),
        (CHAT, {"messages": HI, "stop_token_ids": [5000]}, 400, "stop_token_ids: found token id 5000"),
        (COMPLETION, {"prompt": "a", "best_of": 3}, 400, "best_of: found 3"),
        (COMPLETION, {"prompt": "a", "logit_bias": {"3": 1}}, 400, "logit_bias: found"),
        (COMPLETION, {"prompt": "a", "repetition_penalty": 1.1}, 400, "repetition_penalty: found 1.1, allowed is 1"),
        (COMPLETION, {"prompt": "a", "temprature": 1}, 400, "did you mean 'temperature'?"),
        (COMPLETION, {"prompt": "a", "\ud800": 1}, 400, "body: found a field"),
        (COMPLETION, {"prompt": "a", "stream": 1}, 400, "stream: found 1, allowed is true or false"),
        (COMPLETION, {"prompt": "\ud800"}, 400, "allowed is valid Unicode"),
        (COMPLETION, {"prompt": "a", "model": "tinny"}, 404, "did you mean 'tiny'?"),
        (CHAT, {}, 400, "messages: found none"),
        (CHAT, {"messages": "hi"}, 400, "messages: found 'hi', allowed is a list"),
        (CHAT, {"messages": [{"role": "usr", "content": "x"}]}, 400, "did you mean 'user'?"),
        (CHAT, {"messages": HI, "max_tokens": -1}, 400, "max_tokens: found -1"),
        (CHAT, {"messages": HI, "max_completion_tokens": -1}, 400, "max_completion_tokens: found -1"),
        (CHAT, {"messages": HI, "reasoning_effort": "higher"}, 400, "did you mean 'high'?"),
        (CHAT, {"messages": HI, "thinking": 3}, 400, "thinking: found 3"),
        (CHAT, {"messages": HI, "tool_choice": "required"}, 400, "tool_choice: found 'required'"),
        (CHAT, {"messages": HI, "tools": [{"type": "x"}]}, 400, "tools: found"),
        (CHAT, {"messages": HI, "top_logprobs": 3}, 400, "top_logprobs: found without logprobs"),
        (CHAT, {"messages": HI, "response_format": {"type": "json_object"}}, 400, "response_format: found"),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 500}]}, 400, "messages: found 5"),
        ("/v1/nothing", {}, 404, "Not Found"),
        ("/health", {}, 405, "Method Not Allowed"),
    ],
)
def test_wrong_requests(url, path, body, status, said):
    got = httpx.post(f"{url}{path}", content=json.dumps(body))
    error = got.json()["error"]
    assert got.status_code == status and said in error["message"] and error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and "\n" not in error["message"] and len(error["message"]) < 300
    if status == 400:
        assert (
            error["param"] is None if said.startswith("body") or "did you mean 't" in said else error["param"] in error["message"]
        )


def test_the_client_raises_its_own_errors(client):
    with pytest.raises(openai.BadRequestError, match="max_tokens: found -1") as found:
        client.completions.create(model="tiny", prompt="a", max_tokens=-1)
    assert found.value.param == "max_tokens" and found.value.type == "invalid_request_error"
    with pytest.raises(openai.NotFoundError) as found:
        client.chat.completions.create(model="huge", messages=HI)
    assert found.value.code == "model_not_found"


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"a"', b"\xff\xfe", b"[" * 3000, b'{"prompt": 1' + b"0" * 3900 + b"}"])
def test_bodies_that_are_no_requests(url, body):
    got = httpx.post(f"{url}{COMPLETION}", content=body)
    assert got.status_code == 400 and got.json()["error"]["message"].startswith(("body: found no", "prompt: found"))


def test_many_at_once(service, url):
    want = alone(service, service.engine.model.encode("ab"), max_new_tokens=3)[0]

    async def all_of_them():
        async with httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=120) as http:
            body = {"prompt": "ab", "max_tokens": 3, "temperature": 0}
            asked = [http.post(f"{url}{COMPLETION}", json={**body, "stream": n % 2 == 1}) for n in range(200)]
            return await asyncio.gather(*asked)

    answers = asyncio.run(all_of_them())
    assert {answer.status_code for answer in answers} == {200}
    for answer in answers[::2]:
        assert answer.json()["choices"][0]["text"] == want
    for answer in answers[1::2]:
        chunks = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
        assert "".join(json.loads(chunk)["choices"][0]["text"] for chunk in chunks[:-1]) == want and chunks[-1] == "[DONE]"
    now = service.engine.metrics()
    assert now.free_pages == now.pages and service._running == 0


def test_prompts_that_begin_alike_and_a_server_that_starts_again(model, tmp_path):
    """The usage tells what was found: in pages, in the file by a server that was started anew, and nothing without one."""

    def prefix():
        return PrefixCache(model, Policy(), "full", 16, BlockStore(tmp_path / "a.db"), WindowPool(1 << 20))

    first = prefix()
    engine = Engine(model, slots=1, longest=64, page=16, pages=12, chunks=(16,), prefix=first)
    # Few of its programs are wanted here.
    engine.warm_up = lambda: None
    prompts = [[0, *range(3, 43), *range(50, 50 + more)] for more in (0, 5, 2)]
    told = []
    for kept in (first, None):
        if kept is None:
            # What a new process has: the file alone.
            first.close()
            engine.device.reset()
            engine.allocator = PageAllocator(engine.allocator.pages)
            engine._reuse = Reuse(kept := prefix(), engine.device, engine.allocator)
        with (
            serving(Service(engine, "tiny")) as url,
            openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
        ):
            for prompt in prompts:
                ask = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
                got = client.completions.create(**ask)
                *_, last = client.completions.create(**ask, stream=True, stream_options={"include_usage": True})
                found = [usage.prompt_tokens_details.cached_tokens for usage in (got.usage, last.usage)]
                told.append((got.choices[0].text, got.usage.prompt_tokens, *found))
                kept.flush()
            told.append(httpx.get(f"{url}/metrics").text)
        if kept is not first:
            kept.close()
    before, metrics, after, _ = told[:3], told[3], told[4:7], told[7]
    assert [one[:2] for one in before] == [one[:2] for one in after] and [one[1] for one in before] == [41, 46, 43]
    # Of what the one before left a snapshot is the longest: behind the first prompt, or the prompt itself.
    assert [one[2:] for one in before] == [(0, 41), (41, 46), (41, 43)]
    assert "dsv41_cached_tokens_total 212.0" in metrics
    # Two blocks of the file, of which the last tokens run again, and no snapshot.
    assert [one[2:] for one in after] == [(32, 41), (41, 46), (41, 43)]
