"""The OpenAI-compatible server: HTTP before the engine, whose steps run in one thread (serving §8.1).

A request is read and understood off the event loop, submitted, and answered from its events as they come. A client that leaves
or takes too long has its requests aborted.
"""

import asyncio
import contextlib
import hmac
import json
import logging
import signal
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import h11
import uvicorn
from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric, SummaryMetricFamily
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from dsv41.errors import UserError
from infer.api import Answer, Api, Asked, Refused, error_form
from infer.engine import Engine
from infer.requests import Event

_log = logging.getLogger(__name__)
_IDLE_SECONDS = 0.5  # between two looks of the engine's thread at whether to stop
_STOP_SECONDS = 5.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"


@dataclass(frozen=True)
class Limits:
    """What clients may take: requests at once, bytes of a body, seconds of a request, and of its head and body to come in."""

    requests: int = 256
    body: int = 8 * 2**20
    seconds: float = 600.0
    arrival: float = 30.0

    def __post_init__(self) -> None:
        for name, value in (("max_requests", self.requests), ("max_body", self.body), ("timeout", self.seconds)):
            if not value > 0:
                raise UserError(f"{name}: found {value}, allowed is above 0")


class Service:
    """An engine's HTTP application.

    `start` runs the engine in its thread: it compiles first, and ``ready`` is true from then on. key: what clients must send as
    ``Authorization: Bearer KEY``; "" for anyone.
    """

    def __init__(self, engine: Engine, name: str, limits: Limits | None = None, key: str = ""):
        self.engine, self.limits, self._key = engine, limits or Limits(), key
        self.api = Api(engine.model, name, min(engine.longest, engine.allocator.most * engine.page))
        self.ready = False
        self.failed: str | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="engine", daemon=True)
        self._streams: set[_Events] = set()
        self._running = 0
        self._registry = CollectorRegistry()
        self._answers = Counter(
            "dsv41_http_responses", "Answers by path and status.", ["path", "status"], registry=self._registry
        )
        self._registry.register(cast(Any, self))
        self._created = int(time.time())
        post, get = partial(Route, methods=["POST"]), partial(Route, methods=["GET"])
        routes = [
            post("/v1/completions", partial(self._generate, self.api.completion)),
            post("/v1/chat/completions", partial(self._generate, self.api.chat)),
            get("/v1/models", self._models),
            get("/v1/models/{name:path}", self._model),
            get("/health", self._health),
            get("/metrics", self._metrics),
        ]
        handlers: dict[Any, Any] = {HTTPException: _http_error, Exception: _broken}
        self.app: ASGIApp = _Guard(self, Starlette(routes=routes, exception_handlers=handlers))

    def start(self, on_ready: Callable[[], None] = lambda: None) -> None:
        """Begins to compile, then to step; ``on_ready`` is called between the two."""
        self._on_ready = on_ready
        self._thread.start()

    def stop(self) -> None:
        """Ends the engine's thread after the step that it is at; one that compiles is left behind."""
        self._stop.set()
        self._thread.join(_STOP_SECONDS)

    def _work(self) -> None:
        try:
            self.engine.warm_up()
            self.ready = True
            self._on_ready()
            while not self._stop.is_set():
                if self.engine.wait(_IDLE_SECONDS):
                    self.engine.step()
        except Exception as error:
            _log.exception("the engine stopped")
            self.failed = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            self.ready = False
            for stream in list(self._streams):
                stream.fail(self.failed)

    def unready(self) -> Response | None:
        """The answer of a service that cannot serve yet, or any more."""
        if self.ready:
            return None
        message = f"the engine stopped: {self.failed}" if self.failed else "not ready: programs are being compiled"
        return _error(Refused(message, 503), {"Retry-After": "5"})

    async def _generate(self, read: Callable[[Any], Asked], request: Request) -> Response:
        if refused := self.unready():
            return refused
        if self._running >= self.limits.requests:
            message = f"found {self._running} requests at once, allowed is {self.limits.requests}; try again later"
            return _error(Refused(message, 429), {"Retry-After": "1"})
        # Held until the answer is out, which is after this returns.
        return _Generation(self, read, request)

    def events(self, asked: Asked) -> "_Events":
        """The events of a request, to be closed."""
        return _Events(self, asked)

    @contextlib.contextmanager
    def counted(self) -> Iterator[None]:
        """Counts a request as running."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    async def _models(self, _: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def _model(self, request: Request) -> Response:
        if (name := request.path_params["name"]) != self.api.name:
            return _error(Refused(f"model: found {name!r:.80}, allowed is {self.api.name!r}", 404, "model_not_found"))
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        card = {"id": self.api.name, "object": "model", "created": self._created, "owned_by": "dsv41"}
        return {**card, "max_model_len": self.api.room}

    async def _health(self, _: Request) -> Response:
        return self.unready() or JSONResponse({"status": "ok"})

    async def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=_TEXT)

    def count(self, path: str, status: int) -> None:
        """Counts an answer; paths that there are not share a name."""
        known = ("/v1/completions", "/v1/chat/completions", "/v1/models", "/health", "/metrics")
        self._answers.labels(path if path in known else "other", status).inc()

    def collect(self) -> Iterable[Metric]:
        """The engine's counts, when Prometheus asks."""
        now = self.engine.metrics()
        yield GaugeMetricFamily("dsv41_ready", "1 once requests are served.", float(self.ready))
        yield GaugeMetricFamily("dsv41_http_requests_running", "Requests being answered.", self._running)
        for name, value, text in (
            ("prompt_tokens", now.prompt_tokens, "Tokens of prompts of requests that ended."),
            ("cached_tokens", now.cached_tokens, "Of these the ones found in a cache."),
            ("new_tokens", now.new_tokens, "Tokens made."),
            ("corrupt_blocks", now.corrupt_blocks, "Damaged blocks found in the prefix cache's file, and removed."),
            ("dropped_blocks", now.dropped_blocks, "Blocks that the prefix cache's file did not take."),
            ("preemptions", now.preempted, "Requests that had to begin again."),
        ):
            yield CounterMetricFamily(f"dsv41_{name}", text, value)
        ended = CounterMetricFamily("dsv41_requests", "Requests that ended, by reason.", labels=["finish"])
        for finish, value in now.finished.items():
            ended.add_metric([finish], value)
        yield ended
        for name, value, text in (
            ("requests_waiting", now.waiting, "Requests without a slot."),
            ("requests_running", now.running, "Requests with a slot."),
            ("pages", now.pages, "Pages of the cache."),
            ("free_pages", now.free_pages, "Of these the ones free."),
        ):
            yield GaugeMetricFamily(f"dsv41_{name}", text, value)
        for name, (number, seconds), text in (
            ("time_to_first_token_seconds", now.time_to_first_token, "From a request's arrival to its first token."),
            ("time_per_token_seconds", now.time_per_token, "Between the later tokens of a request."),
        ):
            yield SummaryMetricFamily(f"dsv41_{name}", text, count_value=number, sum_value=seconds)


class _Events:
    """The events of all choices of a request, in the order they come; closing it aborts what has not ended."""

    def __init__(self, service: Service, asked: Asked):
        self._service, self._loop = service, asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Event] | str] = asyncio.Queue()
        self._ids: list[int] = []
        self._left = len(asked.requests)
        service._streams.add(self)
        try:
            for n, request in enumerate(asked.requests):
                self._ids.append(service.engine.submit(request, partial(self._hear, n)))
        except UserError as error:
            self.close()
            # In the words of the client's request.
            named = str(error).replace("max_new_tokens", "max_tokens", 1).replace("stop_ids:", "stop_token_ids:", 1)
            raise UserError(named.replace("prompt:", "messages:", 1) if asked.chat else named) from None
        if service.failed:
            self.fail(service.failed)

    def _hear(self, n: int, event: Event) -> None:
        self._loop.call_soon_threadsafe(self._queue.put_nowait, (n, event))

    def fail(self, reason: str) -> None:
        """Ends the request, as the engine will not."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._queue.put_nowait, reason)

    async def __aiter__(self) -> AsyncIterator[tuple[int, Event]]:
        while self._left:
            got = await self._queue.get()
            if isinstance(got, str):
                raise Refused(f"the engine stopped: {got}", 503)
            n, event = got
            if event.finish in ("error", "abort"):
                raise Refused(f"the request failed: {event.error or event.finish}", 500)
            self._left -= event.finish is not None
            yield n, event

    def close(self) -> None:
        """Aborts what has not ended."""
        self._service._streams.discard(self)
        if self._left:
            for id in self._ids:
                self._service.engine.abort(id)


class _Generation(Response):
    """Reads a request's body and answers it, while watching whether the client is still there."""

    def __init__(self, service: Service, read: Callable[[Any], Asked], request: Request):
        self.service, self.read, self.request, self.background = service, read, request, None
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def started(message: Message) -> None:
            self._started = True
            await send(message)

        with self.service.counted():
            try:
                async with asyncio.timeout(self.service.limits.seconds):
                    asked = await self._asked()
                    await _attended(receive, self._answer(asked, scope, receive, started))
            except ClientDisconnect:
                return
            except TimeoutError:
                error = Refused(f"found no end after {self.service.limits.seconds:g} s, which is what a request may take", 504)
                await self._refuse(error, scope, receive, send)
            except UserError as error:
                await self._refuse(error, scope, receive, send)

    async def _asked(self) -> Asked:
        body = await _body(self.request, self.service.limits)
        return await asyncio.to_thread(_read, self.read, body)

    async def _answer(self, asked: Asked, scope: Scope, receive: Receive, send: Send) -> None:
        answer, events = Answer(self.service.api, asked), self.service.events(asked)
        with contextlib.closing(events):
            if not asked.stream:
                async for n, event in events:
                    for _ in answer.hear(n, event):
                        pass
                await JSONResponse(answer.whole())(scope, receive, send)
                return
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            begun = False
            async for n, event in events:
                # Not before the first event, so that a failure has a status of its own.
                chunks = [*([] if begun else answer.begin()), *answer.hear(n, event)]
                if not begun:
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                    begun = True
                await _send(send, b"".join(map(_chunk, chunks)))
            end = _chunk(answer.end()) if asked.usage else b""
            await _send(send, end + b"data: [DONE]\n\n", more=False)

    async def _refuse(self, error: UserError, scope: Scope, receive: Receive, send: Send) -> None:
        """An answer of its own, or the last of a stream."""
        if not self._started:
            # The rest of a body that was not read is no next request.
            unread = {"Connection": "close"} if _status(error)[0] in (408, 413) else None
            await _error(error, unread)(scope, receive, send)
            return
        form = error_form(str(error), *_status(error))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self.service.limits.arrival):
                await _send(send, _chunk(form), more=False)


class _Guard:
    """Before the application: the key, and a count of the answers."""

    def __init__(self, service: Service, app: ASGIApp):
        self._service, self._app = service, app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._service.count(scope["path"], message["status"])
            await send(message)

        if scope["path"].startswith("/v1/") and not self._known(dict(scope["headers"])):
            error = Refused("found no valid key, allowed is the server's, as Authorization: Bearer KEY", 401, "invalid_api_key")
            await _error(error)(scope, receive, counted)
            return
        await self._app(scope, receive, counted)

    def _known(self, headers: dict[bytes, bytes]) -> bool:
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        key = self._service._key
        return not key or (scheme.lower() == b"bearer" and hmac.compare_digest(given.strip(), key.encode()))


async def _body(request: Request, limits: Limits) -> bytes:
    """A request's body; `Refused` for one that is too large or too slow."""
    parts, size = [], 0
    try:
        async with asyncio.timeout(limits.arrival):
            # One that is too large is read on for a while: a client that still sends would not see the answer.
            async for part in request.stream():
                size += len(part)
                if size <= limits.body:
                    parts.append(part)
                elif size > 8 * limits.body:
                    break
    except TimeoutError:
        if size <= limits.body:
            raise Refused(f"body: found {size} bytes after {limits.arrival:g} s, allowed is all of them", 408) from None
    if size > limits.body:
        raise Refused(f"body: found {size} bytes or more, allowed is {limits.body}", 413)
    return b"".join(parts)


def _read(read: Callable[[Any], Asked], body: bytes) -> Asked:
    no_json = "body: found no JSON ({:.120}), allowed is a JSON object"
    try:
        form = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UserError(no_json.format("nested too deeply" if isinstance(error, RecursionError) else str(error))) from None
    try:
        return read(form)
    except RecursionError:
        # What is written again, or shown, takes more of the stack than reading it did.
        raise UserError(no_json.format("nested too deeply")) from None


async def _attended(receive: Receive, work: Coroutine[Any, Any, None]) -> None:
    """Runs ``work``; ends it and raises `ClientDisconnect` where the client leaves first."""

    async def left() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(left())
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        task.result()
    finally:
        for one in (task, gone):
            one.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


def _chunk(form: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(form, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


async def _send(send: Send, body: bytes, more: bool = True) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _status(error: UserError) -> tuple[int, str | None]:
    return (error.status, error.code) if isinstance(error, Refused) else (400, None)


def _error(error: UserError, headers: dict[str, str] | None = None) -> Response:
    status, code = _status(error)
    return JSONResponse(error_form(str(error), status, code), status, headers)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    message = f"{request.method} {request.url.path[:80]}: {error.detail}"
    return JSONResponse(error_form(message, error.status_code), error.status_code, dict(error.headers or {}))


async def _broken(_: Request, error: Exception) -> Response:
    return JSONResponse(error_form(f"the server failed: {type(error).__name__}", 500), 500)


class _Protocol(H11Protocol):
    """HTTP/1.1 that does not wait forever for the head of a request."""

    arrival = Limits.arrival
    _late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._watch()

    def _watch(self) -> None:
        """Times a head that has begun, or that a new connection owes."""
        open_ = not self.transport.is_closing()
        if open_ and self.conn.their_state is h11.IDLE:
            if self._late is None and self.timeout_keep_alive_task is None:
                self._late = self.loop.call_later(self.arrival, self._give_up)
        elif self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        if not self.transport.is_closing() and self.conn.their_state is h11.IDLE:
            body = json.dumps(error_form(f"found no request after {self.arrival:g} s", 408)).encode()
            head = f"HTTP/1.1 408 Request Timeout\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            self.transport.write(f"{head}connection: close\r\n\r\n".encode() + body)
            self.transport.close()


def listen(host: str, port: int) -> socket.socket:
    """A socket to serve on; `UserError` where there cannot be one."""
    if not 0 <= port <= 65535:
        raise UserError(f"port: found {port}, allowed is 0 (any that is free) to 65535")
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=2048)
    except (OSError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"port: cannot listen on {host}:{port} ({reason}), allowed is an address of this machine") from None


class _Server(uvicorn.Server):
    interrupted = False

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.interrupted |= sig == signal.SIGINT
        super().handle_exit(sig, frame)


def server(service: Service) -> _Server:
    """Serves an application over HTTP; ``run(sockets=[...])`` returns once it is told to stop."""
    protocol = type("Protocol", (_Protocol,), {"arrival": service.limits.arrival})
    config = uvicorn.Config(
        service.app,
        http=protocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=int(_STOP_SECONDS),
    )
    return _Server(config)


def serve(service: Service, listening: socket.socket, on_ready: Callable[[], None]) -> None:
    """Serves until SIGINT, which it raises as `KeyboardInterrupt`, or SIGTERM."""
    service.start(on_ready)
    http = server(service)
    try:
        http.run(sockets=[listening])
    finally:
        service.stop()
    # What the loop does with the signal that it is given again at its end depends on who else handles signals.
    if http.interrupted:
        raise KeyboardInterrupt
