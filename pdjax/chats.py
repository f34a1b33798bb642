"""Requests that know each other: conversations of several turns, and prompts that share blocks."""

from collections.abc import Callable, Sequence
from typing import Protocol

import msgspec

from pdjax.core.config import Config, ConfigError
from pdjax.core.prefix import hash_blocks
from pdjax.core.request import Request
from pdjax.workload import Source

Said = Callable[[int], Sequence[int]]  # request id -> the tokens that it has been given


class Requests(Protocol):
    """A core.loop.Source of requests some of which may become known only in the run.

    longest: of each request, most tokens that its prompt can have.
    """

    @property
    def longest(self) -> Sequence[int]: ...

    def first(self) -> Sequence[Request]: ...

    def after(self, rid: int, t_ns: int) -> Sequence[Request]: ...


def connect(source: Source, config: Config, said: Said) -> Requests:
    """The requests of `source` as turns of conversations and with the hashes that a prefix cache
    looks up, as far as the config asks for that. Raises ConfigError where it cannot be."""
    requests: Requests = source
    if config.workload.turns > 1:
        requests = Chats(source, config, said)
    return Hashed(requests, config.cache.block) if config.cache.prefix else requests


class Chats:
    """With C conversations of n turns, request i is turn i // C of conversation i % C."""

    def __init__(self, source: Source, config: Config, said: Said):
        workload = config.workload
        if source.concurrency is not None:
            raise ConfigError("`workload.turns` needs arrivals that do not wait: not `closed`")
        self._own, self._said = source.requests, said
        self._think_ns = round(workload.think_s * 1e9)
        self._conversations = -(-len(self._own) // workload.turns)
        self._prompts: dict[int, tuple[int, ...]] = {}
        self.longest: list[int] = []
        for request in self._own:
            before = request.id - self._conversations
            said_before = self.longest[before] + self._own[before].max_tokens if before >= 0 else 0
            self.longest.append(said_before + request.prompt_len)
            most = self.longest[-1] + request.max_tokens
            if most > config.model.context:
                raise ConfigError(
                    f"a conversation of `workload.turns` {workload.turns} can have {most} tokens, "
                    f"but `model.context` is {config.model.context}: use fewer or shorter turns"
                )

    def first(self) -> Sequence[Request]:
        first = self._own[: self._conversations]
        self._prompts = {request.id: request.prompt for request in first}
        return first

    def after(self, rid: int, t_ns: int) -> Sequence[Request]:
        """The next turn of its conversation, where there is one."""
        prompt, number = self._prompts.pop(rid), rid + self._conversations
        if number >= len(self._own):
            return ()
        own = self._own[number]
        prompt = (*prompt, *self._said(rid), *own.prompt)
        self._prompts[number] = prompt
        turn = msgspec.structs.replace(
            own, arrival_ns=t_ns + self._think_ns, prompt=prompt, prompt_len=len(prompt)
        )
        return (turn,)


class Hashed:
    """Requests with the hashes of their prompts' blocks of `block` tokens."""

    def __init__(self, requests: Requests, block: int):
        self._requests, self._block = requests, block
        self.longest = requests.longest

    def first(self) -> Sequence[Request]:
        return [self._hash(request) for request in self._requests.first()]

    def after(self, rid: int, t_ns: int) -> Sequence[Request]:
        return [self._hash(request) for request in self._requests.after(rid, t_ns)]

    def _hash(self, request: Request) -> Request:
        blocks, tail = hash_blocks(request.prompt, self._block)
        return msgspec.structs.replace(request, blocks=blocks, tail=tail)
