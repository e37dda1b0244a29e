"""What is kept of a request while it is continued: what it has said and what is held back; and which prompts can be."""

from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Literal

from tokenizers import Tokenizer

from dsv41.config import ModelConfig
from dsv41.errors import UserError
from infer.detokenize import StopStrings, StreamDecoder
from infer.sampling import Sampling


@dataclass
class Continuation:
    """New ids, their log-probabilities and the text that is final so far; ``finish`` once it has ended."""

    sampling: Sampling
    decoder: StreamDecoder
    stops: StopStrings
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: Literal["stop", "length"] | None = None

    @classmethod
    def begin(cls, sampling: Sampling, tokenizer: Tokenizer) -> "Continuation":
        """Nothing said yet, and ended where nothing is wanted."""
        one = cls(sampling, StreamDecoder(tokenizer), StopStrings(sampling.stop))
        one.finish = None if sampling.max_new_tokens else "length"
        return one

    def take(self, token: int, logprob: float, ends: Set[int]) -> str:
        """Accounts for a sampled token; the text that is final now. A token that ends the request is no part of it."""
        if token in ends or token in self.sampling.stop_ids:
            return self._end("stop")
        self.ids.append(token)
        self.logprobs.append(logprob)
        said, stopped = self.stops.push(self.decoder.push(token))
        self.text += said
        if stopped:
            self.finish = "stop"
            return said
        return said + (self._end("length") if len(self.ids) == self.sampling.max_new_tokens else "")

    def _end(self, finish: Literal["stop", "length"]) -> str:
        said, stopped = self.stops.push(self.decoder.flush())
        if not stopped:
            rest, stopped = self.stops.flush()
            said += rest
        self.text += said
        self.finish = "stop" if stopped else finish
        return said


def check_prompt(ids: Sequence[int], sampling: Sampling, config: ModelConfig, room: int, name: str) -> None:
    """Raises `UserError` for a prompt (BOS included) that cannot be continued within ``room`` tokens."""
    if not len(ids):
        raise UserError(f"{name}: found nothing, allowed is text of at least one token")
    if len(ids) + sampling.max_new_tokens > room:
        raise UserError(
            f"{name}: found {len(ids)} tokens and max_new_tokens {sampling.max_new_tokens}, allowed is {room} together"
        )
    for where, tokens in ((name, ids), ("stop_ids", sampling.stop_ids)):
        for token in tokens:
            if not 0 <= token < config.vocab_size:
                raise UserError(f"{where}: found token id {token}, allowed is 0 to {config.vocab_size - 1}")
