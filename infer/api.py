"""OpenAI's forms: the bodies of requests as what the engine is asked, and its events as answers, whole or in chunks."""

import math
import random
import time
import uuid
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from dsv41.errors import UserError, nearest
from infer.chat import ChatTokens, Delta, ReplyParser, render
from infer.detokenize import spelling
from infer.model import Model
from infer.requests import MOST_LIKELIEST, Event, Request
from infer.sampling import Sampling

MOST_CHOICES = 128  # of one request: prompts times n
MOST_STOPS = 16
# Taken and without effect.
_IDLE = {"user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "parallel_tool_calls"}
_SHARED = {
    *_IDLE,
    *("model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop"),
    *("stop_token_ids", "logprobs", "frequency_penalty", "presence_penalty", "logit_bias", "priority"),
    "repetition_penalty",
}
_COMPLETION = {*_SHARED, "prompt", "echo", "suffix", "best_of"}
_CHAT = {*_SHARED, "messages", "tools", "tool_choice", "response_format", "reasoning_effort", "thinking"}
_CHAT |= {"max_completion_tokens", "top_logprobs"}
_KINDS: dict[str, tuple[type, ...]] = {
    "text": (str,),
    "a whole number": (int,),
    "a number": (int, float),
    "true or false": (bool,),
    "an object": (dict,),
    "a list": (list,),
}


class Refused(UserError):
    """A request that gets an answer other than 400: its HTTP status and OpenAI's code for the reason."""

    def __init__(self, message: str, status: int, code: str | None = None):
        super().__init__(message)
        self.status, self.code = status, code


def error_form(message: str, status: int, code: str | None = None) -> dict[str, Any]:
    """OpenAI's form of an error; ``param`` is the field that the message begins with."""
    param = message.split(":")[0]
    kind = "invalid_request_error" if status < 500 and status != 429 else "server_error" if status != 429 else "rate_limit_error"
    named = status == 400 and param.partition("[")[0].partition(".")[0] in _COMPLETION | _CHAT
    return {"error": {"message": message, "type": kind, "param": param if named else None, "code": code}}


@dataclass(frozen=True)
class Asked:
    """A request that was understood: what each choice asks of the engine, and how it is answered.

    of_prompt: choices of a prompt, which are next to each other. echo: text before each choice's own. logprobs: whether told.
    """

    chat: bool
    requests: tuple[Request, ...]
    of_prompt: int
    echo: tuple[str, ...]
    stream: bool
    usage: bool
    logprobs: bool
    thinking: bool = False
    calls: bool = False


class _Fields:
    """A body's fields; null is a field that is not there."""

    def __init__(self, body: Any, known: set[str]):
        if not isinstance(body, dict):
            raise UserError("body: found no JSON object, allowed is one")
        for name in body.keys() - known:
            raise UserError(f"body: found a field {name!r:.60} that is not known{nearest(name, known)}")
        self._body: dict[str, Any] = body

    def get(self, name: str, kind: str, default: Any = None) -> Any:
        value = self._body.get(name)
        if value is None:
            return default
        if not isinstance(value, _KINDS[kind]) or (isinstance(value, bool) and kind != "true or false"):
            raise UserError(f"{name}: found {value!r:.60}, allowed is {kind}")
        return value

    def any(self, name: str) -> Any:
        return self._body.get(name)

    def neutral(self, name: str, *values: Any) -> None:
        """Refuses what is not built, unless it asks for nothing."""
        value = self._body.get(name)
        if value is not None and value not in values:
            raise UserError(f"{name}: found {value!r:.60}, allowed is {values[0]!r}: the server does not do more")

    def within(self, name: str, default: int, low: int, high: int) -> int:
        value = self.get(name, "a whole number", default)
        if not low <= value <= high:
            raise UserError(f"{name}: found {value}, allowed is {low} to {high}")
        return value


class Api:
    """Reads requests to a model called ``name``, of which a request may have ``room`` tokens in all."""

    def __init__(self, model: Model, name: str, room: int):
        self.model, self.name, self.room = model, name, room
        self._chat = ChatTokens(model.tokenizer, model.config.bos_token_id, model.config.eos_token_id)

    def completion(self, body: Any) -> Asked:
        """A body of ``/v1/completions``; raises `UserError`."""
        fields = self._fields(body, _COMPLETION)
        fields.neutral("suffix", "")
        n = fields.within("n", 1, 1, MOST_CHOICES)
        fields.neutral("best_of", n)
        prompts = self._prompts(fields.any("prompt"))
        if len(prompts) * n > MOST_CHOICES:
            raise UserError(f"prompt: found {len(prompts)} times n {n}, allowed is {MOST_CHOICES} choices together")
        logprobs = fields.within("logprobs", -1, 0, MOST_LIKELIEST) if fields.any("logprobs") is not None else None
        echo = fields.get("echo", "true or false", False)
        if echo and logprobs is not None:
            raise UserError("logprobs: found with echo, allowed is one of them: those of a prompt are not known")
        sampling = self._sampling(fields, n, 16)
        return Asked(
            chat=False,
            requests=self._requests(fields, [ids for ids, _ in prompts], sampling, logprobs or 0),
            of_prompt=n,
            echo=tuple(text if echo else "" for _, text in prompts for _ in range(n)),
            logprobs=logprobs is not None,
            **self._streaming(fields),
        )

    def chat(self, body: Any) -> Asked:
        """A body of ``/v1/chat/completions``; raises `UserError`."""
        fields = self._fields(body, _CHAT)
        n = fields.within("n", 1, 1, MOST_CHOICES)
        logprobs = fields.get("logprobs", "true or false", False)
        top = fields.within("top_logprobs", 0, 0, MOST_LIKELIEST)
        if top and not logprobs:
            raise UserError("top_logprobs: found without logprobs, allowed is it with logprobs true")
        if fields.any("messages") is None:
            raise UserError("messages: found none, allowed is a list of one or more")
        tools = [] if self._no_tools(fields) else fields.get("tools", "a list", [])
        thinking, effort = self._thinking(fields)
        pieces = render(fields.get("messages", "a list"), tools, thinking, effort, self._schema(fields))
        ids = self._chat.ids(pieces)
        most = "max_tokens" if fields.any("max_completion_tokens") is None else "max_completion_tokens"
        # At least one, so that a prompt without room for any is refused for its length.
        sampling = self._sampling(fields, n, max(self.room - len(ids), 1), most)
        return Asked(
            chat=True,
            requests=self._requests(fields, [ids], sampling, top),
            of_prompt=n,
            echo=("",) * n,
            logprobs=logprobs,
            thinking=thinking,
            calls=bool(tools),
            **self._streaming(fields),
        )

    def _fields(self, body: Any, known: set[str]) -> _Fields:
        fields = _Fields(body, known)
        name = fields.get("model", "text", self.name)
        if name != self.name:
            message = f"model: found {name!r:.80}, allowed is {self.name!r}{nearest(name, [self.name])}"
            raise Refused(message, 404, "model_not_found")
        for penalty in ("frequency_penalty", "presence_penalty"):
            fields.neutral(penalty, 0)
        fields.neutral("repetition_penalty", 1)
        fields.neutral("logit_bias", {})
        return fields

    def _prompts(self, prompt: Any) -> list[tuple[list[int], str]]:
        """Ids and text of each prompt: a text, ids, or a list of either."""
        whole = lambda ids: isinstance(ids, list) and ids and all(type(id) is int for id in ids)  # noqa: E731
        many = prompt if isinstance(prompt, list) and not whole(prompt) else [prompt]
        found = []
        for one in many:
            if isinstance(one, str):
                found.append((self.model.encode(one), one))
            elif whole(one):
                # Ids that no token has are for the engine to refuse; as text they are nothing.
                known = [id for id in one if 0 <= id < self.model.config.vocab_size]
                found.append((one, self.model.tokenizer.decode(known, skip_special_tokens=False)))
            else:
                value = "none" if one is None else f"{one!r:.60}"
                raise UserError(f"prompt: found {value}, allowed is text, a list of token ids, or a list of these")
        if not found:
            raise UserError("prompt: found none, allowed is one text or more")
        return found

    def _sampling(self, fields: _Fields, n: int, tokens: int, most: str = "max_tokens") -> list[Sampling]:
        """The rules of a prompt's choices, whose draws differ."""
        stop = fields.any("stop")
        stops = [stop] if isinstance(stop, str) else fields.get("stop", "a list", [])
        if len(stops) > MOST_STOPS or not all(isinstance(text, str) for text in stops):
            raise UserError(f"stop: found {stop!r:.60}, allowed is a text or up to {MOST_STOPS}")
        ids = fields.get("stop_token_ids", "a list", [])
        if not all(type(id) is int for id in ids):
            raise UserError(f"stop_token_ids: found {ids!r:.60}, allowed is a list of token ids")
        # A client that names no seed wants another text each time.
        seed = fields.get("seed", "a whole number", random.getrandbits(32)) % 2**32
        rules: dict[str, Any] = {
            "temperature": fields.get("temperature", "a number", 1.0),
            "top_p": fields.get("top_p", "a number", 1.0),
            "top_k": max(fields.get("top_k", "a whole number", 0), 0),  # -1 is another way to say off
            "min_p": fields.get("min_p", "a number", 0.0),
            "stop": tuple(stops),
            "stop_ids": tuple(ids),
        }
        try:
            rules["max_new_tokens"] = fields.get(most, "a whole number", tokens)
            seeds = [seed, *(zlib.crc32(f"{seed}/{k}".encode()) for k in range(1, n))]
            return [Sampling(seed=seed, **rules) for seed in seeds]
        except UserError as error:
            named = str(error).replace("max_new_tokens", most, 1).replace("stop_ids", "stop_token_ids", 1)
            raise UserError(named) from None

    def _requests(self, fields: _Fields, prompts: list[list[int]], rules: list[Sampling], likeliest: int) -> tuple[Request, ...]:
        priority = fields.within("priority", 0, -(2**31), 2**31)
        return tuple(Request(ids, rule, likeliest, priority) for ids in prompts for rule in rules)

    def _streaming(self, fields: _Fields) -> dict[str, bool]:
        options = fields.get("stream_options", "an object", {})
        usage = options.get("include_usage") or False
        if not isinstance(usage, bool):
            raise UserError(f"stream_options: found include_usage {usage!r:.60}, allowed is true or false")
        return {"stream": fields.get("stream", "true or false", False), "usage": usage}

    def _no_tools(self, fields: _Fields) -> bool:
        choice = fields.any("tool_choice")
        if choice not in (None, "auto", "none"):
            raise UserError(f"tool_choice: found {choice!r:.60}, allowed is 'auto' or 'none': a model cannot be made to call")
        return choice == "none"

    def _thinking(self, fields: _Fields) -> tuple[bool, Any]:
        """Whether to think, where it is asked for in so many words or by an effort, and the effort."""
        effort, asked = fields.any("reasoning_effort"), fields.any("thinking")
        if isinstance(asked, Mapping):
            asked = {"enabled": True, "disabled": False}.get(str(asked.get("type")), asked)
        if asked is not None and not isinstance(asked, bool):
            allowed = '{"type": "enabled"} or {"type": "disabled"}, true or false'
            raise UserError(f"thinking: found {asked!r:.60}, allowed is {allowed}")
        if effort == "none":
            effort, asked = None, asked or False
        return (effort is not None if asked is None else asked), effort

    def _schema(self, fields: _Fields) -> Any:
        """The schema that a reply is asked to follow."""
        form = fields.get("response_format", "an object", {"type": "text"})
        if form.get("type") == "text":
            return None
        named = form.get("json_schema")
        if form.get("type") == "json_schema" and isinstance(named, dict) and isinstance(named.get("schema"), dict):
            if named.get("strict"):
                raise UserError("response_format: found strict, allowed is a schema without: a reply is not held to it")
            return named["schema"]
        raise UserError(f"response_format: found {form!r:.60}, allowed is type 'text', or 'json_schema' with a schema")


@dataclass
class _Choice:
    """What was said of a choice so far."""

    parser: ReplyParser | None
    text: str = ""
    reasoning: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    offset: int = 0
    last: Event | None = None


class Answer:
    """Puts the events of a request's choices into OpenAI's forms: a chunk for each, or one answer at the end."""

    def __init__(self, api: Api, asked: Asked):
        self.asked = asked
        self._tokenizer = api.model.tokenizer
        parser = lambda: ReplyParser(asked.thinking, asked.calls) if asked.chat else None  # noqa: E731
        self._choices = [_Choice(parser(), offset=len(echo)) for echo in asked.echo]
        kind = "chat.completion" if asked.chat else "text_completion"
        id = f"{'chatcmpl' if asked.chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._head = {"id": id, "object": kind, "created": int(time.time()), "model": api.name}

    def begin(self) -> Iterable[dict[str, Any]]:
        """Chunks before any event."""
        for n, echo in enumerate(self.asked.echo):
            if self.asked.chat:
                yield self._chunk(n, {"role": "assistant", "content": ""})
            elif echo:
                yield self._chunk(n, echo)

    def hear(self, n: int, event: Event) -> Iterable[dict[str, Any]]:
        """Takes the next event of a choice; its chunks. Nothing may follow the last."""
        choice = self._choices[n]
        logprobs = self._logprobs(choice, event) if self.asked.logprobs and event.ids else None
        if event.finish:
            choice.last = event
        if choice.parser is None:
            choice.text += event.text
            yield self._chunk(n, event.text, logprobs, event.finish)
            return
        deltas = choice.parser.push(event.text) + (choice.parser.finish() if event.finish else [])
        for delta in deltas:
            yield self._chunk(n, self._delta(choice, delta), logprobs)
            logprobs = None
        if event.finish or logprobs:
            yield self._chunk(n, {}, logprobs, self._finish(choice) if event.finish else None)

    def end(self) -> dict[str, Any]:
        """The chunk that tells the usage."""
        return {**self._head, "object": self._chunk_kind, "choices": [], "usage": self.usage()}

    def whole(self) -> dict[str, Any]:
        """The answer, after the last events of all choices."""
        choices = []
        for n, choice in enumerate(self._choices):
            one: dict[str, Any] = {"index": n, "finish_reason": self._finish(choice)}
            one["logprobs"] = self._joined(choice.logprobs) if self.asked.logprobs else None
            if choice.parser is None:
                one["text"] = self.asked.echo[n] + choice.text
            else:
                message: dict[str, Any] = {"role": "assistant", "content": choice.text}
                if self.asked.thinking:
                    message["reasoning_content"] = choice.reasoning
                if choice.calls:
                    message["tool_calls"] = [{k: v for k, v in call.items() if k != "index"} for call in choice.calls]
                one["message"] = message
            choices.append(one)
        return {**self._head, "choices": choices, "usage": self.usage()}

    def usage(self) -> dict[str, Any]:
        """Tokens of all choices; those of a prompt once."""
        used = [choice.last.usage for choice in self._choices if choice.last and choice.last.usage]
        prompts = used[:: self.asked.of_prompt]
        prompt, new = sum(u.prompt_tokens for u in prompts), sum(u.new_tokens for u in used)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": sum(u.cached_tokens for u in prompts)},
        }

    @property
    def _chunk_kind(self) -> str:
        return "chat.completion.chunk" if self.asked.chat else "text_completion"

    def _chunk(self, n: int, said: Any, logprobs: Any = None, finish: str | None = None) -> dict[str, Any]:
        told = None if logprobs is None else self._joined([logprobs])
        one = {"index": n, "delta" if self.asked.chat else "text": said, "logprobs": told, "finish_reason": finish}
        return {**self._head, "object": self._chunk_kind, "choices": [one], **({"usage": None} if self.asked.usage else {})}

    def _finish(self, choice: _Choice) -> str | None:
        finish = choice.last.finish if choice.last else None
        return "tool_calls" if finish == "stop" and choice.calls else finish

    def _delta(self, choice: _Choice, delta: Delta) -> dict[str, Any]:
        choice.reasoning += delta.reasoning
        choice.text += delta.content
        if delta.call is None:
            return {"reasoning_content": delta.reasoning} if delta.reasoning else {"content": delta.content}
        function = {"name": delta.call.name, "arguments": delta.call.json()}
        call = {"index": len(choice.calls), "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
        choice.calls.append(call)
        return {"tool_calls": [call]}

    def _logprobs(self, choice: _Choice, event: Event) -> Any:
        """The log-probabilities of an event, one entry a token."""
        told = []
        for id, value, likeliest in zip(event.ids, event.logprobs, event.likeliest, strict=True):
            token, others = self._token(id, value), [self._token(*other) for other in likeliest]
            if self.asked.chat:
                told.append({**token, "top_logprobs": others})
                continue
            name = lambda token: _name(bytes(token["bytes"]))  # noqa: E731
            top = {name(other): other["logprob"] for other in others} | {name(token): token["logprob"]}
            told.append((name(token), token["logprob"], top if others else None, choice.offset))
            choice.offset += len(token["token"])
        choice.logprobs.append(told)
        return told

    def _token(self, id: int, value: float) -> dict[str, Any]:
        spelled = spelling(self._tokenizer, id)
        # JSON has no infinity; this is what others say in its place.
        finite = value if math.isfinite(value) else -9999.0
        return {"token": spelled.decode("utf-8", "replace"), "logprob": finite, "bytes": list(spelled)}

    def _joined(self, told: list[Any]) -> dict[str, Any]:
        entries = [entry for some in told for entry in some]
        if self.asked.chat:
            return {"content": entries}
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        columns: dict[str, Any] = {name: [entry[n] for entry in entries] for n, name in enumerate(names)}
        if not any(columns["top_logprobs"]):
            columns["top_logprobs"] = None
        return columns


def _name(spelled: bytes) -> str:
    """A token's text, or its bytes where they are no text of their own."""
    try:
        return spelled.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelled)
