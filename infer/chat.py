"""DeepSeek-V4.1's chat encoding: conversations as prompts, and replies back as reasoning, content and tool calls (serving §8.2).

The sentences of `_EFFORT`, `_TOOLS` and `_FORMAT` are those of the encoder that DeepSeek published with the release (Copyright
(c) DeepSeek, MIT license), letter by letter as open ports of it and their tests have them; its own file was not compared.
"""

import contextlib
import json
import re
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal, NamedTuple

from tokenizers import Tokenizer

from dsv41.errors import UserError, nearest
from infer.detokenize import begun

BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
SYSTEM, USER, ASSISTANT = "<｜System｜>", "<｜User｜>", "<｜Assistant｜>"
THINK, END_THINK = "<think>", "</think>"
DSML, IMAGE = "｜DSML｜", "<｜deepseek_image｜>"
MARKS = (BOS, EOS, SYSTEM, USER, ASSISTANT, THINK, END_THINK, DSML, IMAGE)
EFFORTS = {"low": 50, "high": 75, "max": 100}
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}

_EFFORT = "Reasoning Effort: {} (range 1-100, the higher the value, the more thorough the reasoning)\n\n"
_FORMAT = "## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
_TOOLS = (
    """## Tools

You have access to a set of tools to help answer the user's question. You can invoke tools by writing a "<｜DSML｜ calls>" block \
like the following:

<｜DSML｜ calls>
<｜DSML｜ invoke name="$TOOL_NAME">
<｜DSML｜ parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜ parameter>
...
</｜DSML｜ invoke>
<｜DSML｜ invoke name="$TOOL_NAME2">
...
</｜DSML｜ invoke>
</｜DSML｜ calls>

String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, objects), \
pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> BEFORE \
any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

""",
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls.\n",
)
_OPEN, _CLOSE = "<｜DSML｜ calls>", "</｜DSML｜ calls>"
_END_INVOKE, _END_PARAMETER = "</｜DSML｜ invoke>", "</｜DSML｜ parameter>"
_MARK = re.compile("|".join(map(re.escape, MARKS)))


class Piece(NamedTuple):
    """Part of a prompt: a mark, which is one token, or text, in which nothing is one."""

    text: str
    mark: bool


@dataclass(frozen=True)
class Call:
    """A tool's name, which may be ``namespace::name``, and its arguments as JSON values."""

    name: str
    arguments: dict[str, Any]

    def json(self) -> str:
        """The arguments, as OpenAI's form has them."""
        return _json(self.arguments)


@dataclass(frozen=True)
class Reply:
    """What an assistant said."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[Call, ...] = ()


@dataclass
class _Turn:
    """A message, or several of a user and of tools in a row. ids: of the call that a part answers."""

    role: Literal["system", "user", "assistant"]
    parts: list[str]
    ids: list[str | None] = field(default_factory=list)
    reply: Reply = Reply()


def effort_number(effort: Any) -> int:
    """The number, 1 to 100, that the model is told; without one as for "high"."""
    if effort is None:
        return EFFORTS["high"]
    if isinstance(effort, str) and effort in EFFORTS:
        return EFFORTS[effort]
    if isinstance(effort, int) and not isinstance(effort, bool) and 1 <= effort <= 100:
        return effort
    near = nearest(effort, EFFORTS) if isinstance(effort, str) else ""
    raise UserError(f"reasoning_effort: found {effort!r:.60}, allowed is 1 to 100 or {', '.join(EFFORTS)}{near}")


def render(
    messages: Sequence[Any],
    tools: Sequence[Any] = (),
    thinking: bool = False,
    effort: Any = None,
    schema: Any = None,
) -> list[Piece]:
    """The prompt for an assistant's next turn; the texts of all pieces joined are the string of the release's encoding.

    messages: OpenAI's, whose last is not the assistant's; role "developer" is "system". tools: OpenAI's. effort: see
    `effort_number`; told in thinking mode alone. schema: JSON that the reply is asked to follow, not held to. Of earlier turns
    the reasoning is left out, unless there are tools. Raises `UserError` for messages that are none.
    """
    number, turns = effort_number(effort), _turns(messages)
    appended: list[Piece] = []
    if tools:
        appended += [*_own("\n\n" + _TOOLS[0]), Piece("\n".join(map(_schema, tools)), False), *_own(_TOOLS[1])]
    if schema is not None:
        appended += [Piece(f"\n\n{_FORMAT}{_json(schema)}", False)]
    if appended and turns[0].role != "system":
        turns.insert(0, _Turn("system", [""]))
    asked = [n for n, turn in enumerate(turns) if turn.role == "user" or (turn.role == "system" and n)]
    if not asked or turns[-1].role == "assistant":
        raise UserError(f"messages: found a last message of role {messages[-1]['role']!r}, allowed is one to answer")
    keep = lambda n: bool(tools) or n >= asked[-1]  # noqa: E731  # whose reasoning stays
    pieces = [Piece(BOS, True)]
    for n, turn in enumerate(turns):
        if turn.role == "system" or (n == 0 and thinking):
            pieces.append(Piece(SYSTEM, True))
        if n == 0 and thinking:
            pieces.append(Piece(_EFFORT.format(number), False))
        if turn.role == "assistant":
            pieces += [*render_reply(turn.reply, thinking and keep(n)), Piece(EOS, True)]
            continue
        if turn.role == "user":
            pieces.append(Piece(USER, True))
        pieces.append(Piece("\n\n".join(turn.parts), False))
        if n == 0 and turn.role == "system":
            pieces += appended
        if n in asked and (n + 1 == len(turns) or turns[n + 1].role == "assistant"):
            pieces += [Piece(ASSISTANT, True), Piece(THINK if thinking and keep(n) else END_THINK, True)]
    return pieces


def render_reply(reply: Reply, thinking: bool) -> list[Piece]:
    """An assistant's turn without its end; `parse` gives the reply back, where no text of it spells a mark."""
    pieces = [Piece(reply.reasoning, False), Piece(END_THINK, True)] if thinking else []
    pieces.append(Piece(reply.content, False))
    if not reply.calls:
        return pieces
    pieces += _own(f"\n\n{_OPEN}\n")
    for n, call in enumerate(reply.calls):
        pieces += [*_own("\n" * (n > 0) + "<｜DSML｜ invoke name="), Piece(f'"{call.name}">\n', False)]
        for m, (name, value) in enumerate(call.arguments.items()):
            plain = isinstance(value, str)
            pieces += _own("\n" * (m > 0) + "<｜DSML｜ parameter name=")
            pieces.append(Piece(f'"{name}" string="{str(plain).lower()}">{value if plain else _json(value)}', False))
            pieces += _own(_END_PARAMETER)
        pieces += _own(f"\n{_END_INVOKE}")
    return [*pieces, *_own(f"\n{_CLOSE}")]


def _own(text: str) -> Iterable[Piece]:
    """Text of the encoding's own, in which marks are marks."""
    at = 0
    for found in _MARK.finditer(text):
        yield Piece(text[at : found.start()], False)
        yield Piece(found[0], True)
        at = found.end()
    yield Piece(text[at:], False)


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _schema(tool: Any) -> str:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise UserError(f'tools: found {tool!r:.60}, allowed is {{"type": "function", "function": {{"name": ...}}}}')
    return _json(function)


def _texts(content: Any, where: str) -> list[str]:
    """The parts of a message's content."""
    if content is None:
        return [""]
    parts = [content] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise UserError(f"{where}: found {content!r:.60}, allowed is text or a list of text parts")
    texts = []
    for part in parts:
        if isinstance(part, Mapping) and part.get("type") in ("image", "image_url"):
            raise UserError(f"{where}: found an image, allowed is text: this model has no vision")
        text = part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part
        if not isinstance(text, str):
            raise UserError(f'{where}: found {part!r:.60}, allowed is text or {{"type": "text", "text": ...}}')
        if IMAGE in text:
            raise UserError(f"{where}: found {IMAGE!r}, which stands for an image, allowed is text without it")
        texts.append(text)
    return texts


def _turns(messages: Sequence[Any]) -> list[_Turn]:
    """Messages as turns: those of tools are parts of the user's, in the order of the calls that they answer."""
    turns: list[_Turn] = []
    for n, message in enumerate(messages):
        where = f"messages[{n}]"
        if not isinstance(message, Mapping):
            raise UserError(f"{where}: found {message!r:.60}, allowed is an object with role and content")
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise UserError(f"{where}.role: found {role!r:.60}, allowed are {', '.join(_ROLES)}{nearest(str(role), _ROLES)}")
        kind, texts = _ROLES[role], _texts(message.get("content"), f"{where}.content")
        if kind in ("user", "tool"):
            if not turns or turns[-1].role != "user":
                turns.append(_Turn("user", []))
            if kind == "tool":
                turns[-1].parts.append(f"<tool_result>{'\n\n'.join(texts)}</tool_result>")
                turns[-1].ids.append(_id(message, "tool_call_id", where))
            else:
                turns[-1].parts += texts
                turns[-1].ids += [None] * len(texts)
        elif kind == "system":
            turns.append(_Turn("system", texts))
        else:
            name = "reasoning_content" if message.get("reasoning_content") else "reasoning"
            reasoning = "\n\n".join(_texts(message.get(name) or "", f"{where}.{name}"))
            calls = message.get("tool_calls") or []
            if not isinstance(calls, list):
                raise UserError(f"{where}.tool_calls: found {calls!r:.60}, allowed is a list of calls")
            made = tuple(_call(call, f"{where}.tool_calls[{m}]") for m, call in enumerate(calls))
            ids: list[str | None] = [_id(call, "id", f"{where}.tool_calls[{m}]") for m, call in enumerate(calls)]
            turns.append(_Turn("assistant", [], ids, Reply(reasoning, "\n\n".join(texts), made)))
    if not turns:
        raise UserError("messages: found none, allowed is one or more")
    order: dict[str | None, int] = {}
    for turn in turns:
        if turn.reply.calls:
            order = {id: n for n, id in enumerate(turn.ids) if id}
        elif turn.role == "user" and order:
            slots = [n for n, id in enumerate(turn.ids) if id is not None]
            came = sorted(slots, key=lambda n, ids=tuple(turn.ids): order.get(ids[n], 0))
            for slot, part in zip(slots, [turn.parts[n] for n in came], strict=True):
                turn.parts[slot] = part
    return turns


def _id(form: Mapping[str, Any], name: str, where: str) -> str:
    """What a call, or the answer to one, is known by; "" where it is by nothing."""
    id = form.get(name)
    if id is not None and not isinstance(id, str):
        raise UserError(f"{where}.{name}: found {id!r:.60}, allowed is text")
    return id or ""


def _call(call: Any, where: str) -> Call:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise UserError(f"{where}: found {call!r:.60}, allowed is an object with a function")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise UserError(f"{where}.function.name: found {name!r:.60}, allowed is text")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments or "{}")
    if not isinstance(arguments, dict):
        raise UserError(f"{where}.function.arguments: found {arguments!r:.60}, allowed is the JSON of an object")
    return Call(name, arguments)


class ChatTokens:
    """Token ids of rendered prompts: a mark is its own token, and no text of a client becomes one.

    Where the tokenizer has no token for a mark, as those that are trained here, it is spelled out.
    """

    def __init__(self, tokenizer: Tokenizer, bos_id: int, eos_id: int):
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        self._marks = {mark: id for mark in MARKS if (id := tokenizer.token_to_id(mark)) is not None}
        self._marks |= {BOS: bos_id, EOS: eos_id}
        guarded = {id: token.content for id, token in added.items() if token.special or token.content in MARKS}
        self._guarded = set(guarded)
        # Zero-width, so that ones that overlap are all found.
        self._spelled = re.compile("(?=" + "|".join(map(re.escape, guarded.values())) + ")") if guarded else None

    def ids(self, pieces: Iterable[Piece]) -> list[int]:
        """Ids of pieces; text between two marks is encoded as a whole. `UserError` for text that is not Unicode."""
        ids: list[int] = []
        text = ""
        for piece in pieces:
            if not piece.mark:
                text += piece.text
                continue
            ids += self._text(text)
            text = ""
            own = self._marks.get(piece.text)
            ids += self._text(piece.text) if own is None else [own]
        return ids + self._text(text)

    def _text(self, text: str) -> list[int]:
        if not text:
            return []
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("messages: found half of a surrogate pair, allowed is valid Unicode text") from None
        encode = lambda part: self._tokenizer.encode(part, add_special_tokens=False).ids  # noqa: E731
        ids = encode(text)
        if self._spelled is None or self._guarded.isdisjoint(ids):
            return ids
        # Without its first character it is no token any more.
        cuts = [0, *(found.start() + 1 for found in self._spelled.finditer(text)), len(text)]
        return [id for a, b in pairwise(cuts) for id in encode(text[a:b])]


def speaking(tokenizer: Tokenizer) -> Tokenizer:
    """The tokenizer with the marks of replies as text when it decodes, which leaves special tokens out."""
    shown = (THINK, END_THINK, DSML)
    if not any(token.special and token.content in shown for token in tokenizer.get_added_tokens_decoder().values()):
        return tokenizer
    form = json.loads(tokenizer.to_str())
    for token in form["added_tokens"]:
        token["special"] &= token["content"] not in shown
    changed = Tokenizer.from_str(json.dumps(form))
    changed.encode_special_tokens = tokenizer.encode_special_tokens
    return changed


class MalformedReply(ValueError):
    """A reply whose calls are none."""


@dataclass(frozen=True)
class Delta:
    """What became clear of a reply: more of its reasoning or content, or one more call."""

    reasoning: str = ""
    content: str = ""
    call: Call | None = None


_TAG = re.compile(r'\s*(<[^">]*(?:"[^"]*"[^">]*)*>)')
_INVOKE = re.compile(r'<｜DSML｜ invoke name="([^"]+)">')
_PARAMETER = re.compile(r'<｜DSML｜ parameter name="([^"]+)" string="(true|false)">')
_LONGEST_TAG = 4096


class ReplyParser:
    """Parses a reply as it comes, in pieces of any size; all of `push` and `finish` joined is what the whole text gives.

    thinking: whether the prompt ended with an open ``<think>``. calls: whether tool calls are looked for. A call is given when
    it is complete. Where calls are malformed, ``malformed`` says why, and all text from there on is content.
    """

    def __init__(self, thinking: bool, calls: bool = True):
        self._text, self._rest, self._ended = "", "", False
        self.malformed: str | None = None
        self._out: list[Delta] = []
        self._steps = self._run(thinking, calls)
        next(self._steps)

    def push(self, text: str) -> list[Delta]:
        """Takes more text."""
        self._text += text
        return self._go()

    def finish(self) -> list[Delta]:
        """Ends the reply, after which nothing is held back."""
        self._ended = True
        return self._go()

    def _go(self) -> list[Delta]:
        next(self._steps, None)
        out, self._out = self._out, []
        return out

    def _run(self, thinking: bool, calls: bool) -> Iterator[None]:
        try:
            yield from self._reply(thinking, calls)
        except MalformedReply as error:
            self.malformed, self._text = str(error), self._rest + self._text
            yield from self._until_mark("content", ())

    def _reply(self, thinking: bool, calls: bool) -> Iterator[None]:
        if thinking:
            yield from self._until_mark("reasoning", (END_THINK,))
        self._rest = yield from self._until_mark("content", (f"\n\n{_OPEN}", _OPEN) if calls else ())
        if not self._rest:
            return
        tag = yield from self._tag()
        while True:
            call = yield from self._call(tag)
            self._out.append(Delta(call=call))
            self._rest = ""
            if (tag := (yield from self._tag())) == _CLOSE:
                break
        self._rest = ""
        while True:
            if self._text.strip():
                raise MalformedReply("text after the calls")
            self._rest, self._text = self._rest + self._text, ""
            if self._ended:
                return
            yield

    def _until_mark(self, kind: str, marks: tuple[str, ...]) -> Generator[None, None, str]:
        """Gives out text up to the first mark; that mark, "" where there was none."""
        while True:
            found = [(at, mark) for mark in marks if (at := self._text.find(mark)) >= 0]
            at, mark = min(found, default=(len(self._text) if self._ended else begun(self._text, marks), ""))
            if at:
                self._out.append(Delta(**{kind: self._text[:at]}))
            self._text = self._text[at + len(mark) :]
            if mark or self._ended:
                return mark
            yield

    def _call(self, tag: str) -> Generator[None, None, Call]:
        """A call behind its first tag."""
        if not (invoke := _INVOKE.fullmatch(tag)):
            raise MalformedReply(f"{tag[:80]!r} in the place of a call")
        arguments: dict[str, Any] = {}
        while (tag := (yield from self._tag())) != _END_INVOKE:
            if not (parameter := _PARAMETER.fullmatch(tag)):
                raise MalformedReply(f"{tag[:80]!r} in the place of a parameter")
            name, plain = parameter.groups()
            if name in arguments:
                raise MalformedReply(f"parameter {name!r} twice")
            value = yield from self._value()
            try:
                arguments[name] = value if plain == "true" else json.loads(value, parse_constant=_no_constant)
                _json(arguments).encode()  # not so with half of a surrogate pair
            except (ValueError, RecursionError):
                raise MalformedReply(f"parameter {name!r} is no JSON") from None
        return Call(invoke[1], arguments)

    def _value(self) -> Generator[None, None, str]:
        at = 0
        while (end := self._text.find(_END_PARAMETER, at)) < 0:
            at = max(len(self._text) - len(_END_PARAMETER) + 1, 0)
            yield from self._more()
        value = self._text[:end]
        self._consume(end + len(_END_PARAMETER))
        return value

    def _tag(self) -> Generator[None, None, str]:
        while not (found := _TAG.match(self._text)):
            said = self._text.lstrip()
            if (said and said[0] != "<") or len(self._text) > _LONGEST_TAG:
                raise MalformedReply(f"{said[:80]!r} in the place of a tag")
            yield from self._more()
        self._consume(found.end())
        return found[1]

    def _consume(self, size: int) -> None:
        self._rest, self._text = self._rest + self._text[:size], self._text[size:]

    def _more(self) -> Iterator[None]:
        if self._ended:
            raise MalformedReply("cut off")
        yield


def _no_constant(name: str) -> None:
    raise ValueError(name)


def parse(text: str, thinking: bool, calls: bool = True) -> Reply:
    """A whole reply, with or without its end mark; raises `MalformedReply`. See `ReplyParser`."""
    parser = ReplyParser(thinking, calls)
    deltas = parser.push(text.removesuffix(EOS)) + parser.finish()
    if parser.malformed:
        raise MalformedReply(parser.malformed)
    reasoning, content = ("".join(getattr(delta, kind) for delta in deltas) for kind in ("reasoning", "content"))
    return Reply(reasoning, content, tuple(delta.call for delta in deltas if delta.call))
