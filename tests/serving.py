"""What tests of the server share: a service on loopback, an engine that says what it is told to, requests, waiting."""

import contextlib
import threading
import time

import httpx

from infer.engine import Engine
from infer.requests import Event, Metrics, Usage
from infer.server import listen, server

HI = [{"role": "user", "content": "hi"}]
COMPLETION, CHAT = "/v1/completions", "/v1/chat/completions"

# The least that compiles, as programs cost most of the time: window, and Full with a pool.
TWO_LAYERS = {
    "num_hidden_layers": 2,
    "compress_ratios": (0, 1),
    "kv_source_layer_ids": (1,),
    "index_source_layer_ids": (1,),
    "candidate_source_layer_id": 1,
    "engram_layer_ids": (),
    "engram_num_embeddings": (),
    "dspark_target_layer_ids": (1,),
}


@contextlib.contextmanager
def serving(service, wait=True):
    """The service's address."""
    with listen("127.0.0.1", 0) as listening:
        running = server(service)
        thread = threading.Thread(target=running.run, kwargs={"sockets": [listening]})
        service.start()
        thread.start()
        try:
            url = f"http://127.0.0.1:{listening.getsockname()[1]}"
            while wait and httpx.get(f"{url}/health").status_code != 200:
                time.sleep(0.02)
            yield url
        finally:
            running.should_exit = True
            thread.join()
            service.stop()


class Scripted(Engine):
    """An engine that says what it is told to, a few letters at a time, once `go` is set."""

    script = "hello"
    finish = "stop"
    broken = False

    def __init__(self, model, *_, **__):
        self.model, self.longest, self.page = model, 2048, 64
        self.allocator = type("Pages", (), {"most": 32})()
        self.jobs, self.aborted, self.asked = {}, [], []
        self.go, self.warm = threading.Event(), threading.Event()
        self.go.set()
        self.warm.set()

    def submit(self, request, on_event):
        self.asked.append(request)
        self.jobs[len(self.asked)] = [on_event, 0]
        return len(self.asked)

    def abort(self, id):
        self.aborted.append(id)
        self.jobs.pop(id, None)

    def wait(self, timeout):
        return (self.go.wait(0.01) and bool(self.jobs)) or time.sleep(0.01) is not None

    def warm_up(self):
        assert self.warm.wait(10)

    def metrics(self):
        return Metrics(
            5, 2, 3, {"stop": 1, "length": 0, "abort": 0, "error": 0}, 0, 0, len(self.jobs), 32, 32, (1, 0.5), (2, 0.25)
        )

    def step(self):
        if self.broken:
            raise RuntimeError("out of luck")
        for id, job in list(self.jobs.items()):
            on_event, at = job
            job[1] = at + 3
            text, done = self.script[at : at + 3], at + 3 >= len(self.script)
            usage = Usage(7, 4, len(self.script)) if done else None
            if done:
                self.jobs.pop(id, None)
            error = "no luck" if done and self.finish == "error" else None
            ids = tuple(range(3, 3 + len(text)))
            reason = self.finish if done else None
            on_event(Event(id, text, ids, (-0.5,) * len(text), ((),) * len(text), reason, usage, error))
        return True


def eventually(true):
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)
