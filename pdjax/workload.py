"""The requests of a run: when they arrive, how long they are and what they say.

Everything follows from one seed. Each concern (arrivals, lengths, text, sampling) has a random
stream of its own, so a change to one leaves the others as they are: another rate keeps lengths
and prompts, and the first n requests are the same however many follow.
"""

import functools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise, takewhile
from pydoc_data.topics import topics

import msgspec
import numpy as np
from absl import logging

from pdjax.core.config import Arrivals, ConfigError, Lengths, Trace, Workload
from pdjax.core.request import Request, SamplingParams
from pdjax.traces import BLOCK, TraceRow, read_azure, read_mooncake

Encode = Callable[[str], list[int]]  # text -> token ids
Chat = Callable[[str], str]  # what the user says -> the text that the model is given
Write = Callable[[int, int, str], list[int]]  # (number, tokens, heading) -> that many token ids

_READERS = {"mooncake": read_mooncake, "azure": read_azure}
# One random stream per concern; the numbers are part of what a seed means.
_ARRIVALS, _PROMPT_LENGTHS, _OUTPUT_LENGTHS, _TRACE_ROWS, _TEXT, _SAMPLING = range(6)
_SHARED_PIECE = 1 << 31  # the number of the piece of text that all prompts share


@dataclass
class Source:
    """Gives a run its requests. Serving them again begins with `first`.

    requests: all of them, by id. concurrency: most requests open at once in a closed loop, None
    where arrivals do not wait. clipped: requests cut to fit the context. dropped: rows of the
    trace without output, which are left out.
    """

    requests: tuple[Request, ...]
    concurrency: int | None = None
    clipped: int = 0
    dropped: int = 0
    _next: int = field(default=0, repr=False)
    _clients: dict[int, str] = field(default_factory=dict, repr=False)

    @property
    def longest(self) -> Sequence[int]:
        """The prompt length of each request."""
        return [request.prompt_len for request in self.requests]

    def first(self) -> Sequence[Request]:
        """The requests whose arrival is known before the run begins, in order of arrival."""
        known = self.requests[: self.concurrency]
        self._next = len(known)
        self._clients = {request.id: request.client_id for request in known}
        return known

    def after(self, rid: int, t_ns: int) -> Sequence[Request]:
        """The requests caused by the end of request `rid` at `t_ns`: its client's next one.

        Raises KeyError where `rid` is not open: an end is told once.
        """
        client_id = self._clients.pop(rid)
        if self._next == len(self.requests):
            return ()
        request = msgspec.structs.replace(
            self.requests[self._next], arrival_ns=t_ns, client_id=client_id
        )
        self._next += 1
        self._clients[request.id] = client_id
        return (request,)


def make_source(
    workload: Workload,
    seed: int,
    *,
    encode: Encode | None,
    vocab: int,
    context: int,
    eos: Sequence[int],
    chat: Chat | None = None,
) -> Source:
    """The requests that `workload` describes; ids are 0..n-1 in order of arrival.

    encode: None leaves the prompts empty, for a run that only counts tokens. vocab: random
    tokens are in [0, vocab). context: most tokens of prompt plus output; a longer request loses
    the end of its prompt (and of its output, where that alone is too long). eos: the tokens
    that end an answer. chat: the model's chat template. A trace gives at most
    `workload.requests` requests, its first ones.

    Raises ConfigError for values that make no workload and TraceError for a broken trace.
    """
    _check(workload, seed, chat)
    rows, dropped = _trace_rows(workload.trace) if workload.trace.path else ([], 0)
    shapes = _shapes(workload, seed, rows)
    frame, write, prompts = ([], []), None, [()] * len(shapes)
    if encode is not None:
        write = _random(seed, vocab) if workload.text == "random" else _stdlib(seed, encode)
        head, tail = _chat_frame(encode, chat) if chat and workload.chat else ([], [])
        frame = head + write(_SHARED_PIECE, workload.shared, ""), tail
    shapes, clipped = _fit(shapes, context, len(frame[0]) + len(frame[1]))
    if write is not None:
        prompts = _prompts(shapes, workload.trace.length_scale, frame, write)
    closed = workload.arrivals.process == "closed"
    return Source(
        _requests(workload, seed, shapes, prompts, () if workload.ignore_eos else tuple(eos)),
        workload.arrivals.concurrency if closed else None,
        clipped,
        dropped,
    )


def arrival_times(arrivals: Arrivals, n: int, rng: np.random.Generator) -> np.ndarray:
    """Seconds at which `n` requests arrive; the first arrives at 0.

    Gaps have the mean 1 / rate: exponential for `poisson`, gamma of shape 1 / cv**2 for `gamma`
    (whose coefficient of variation is 1 / sqrt(shape)), all equal for `uniform`.
    """
    match arrivals.process:
        case "poisson":
            gaps = rng.standard_exponential(n - 1)
        case "gamma":
            gaps = rng.standard_gamma(arrivals.cv**-2, n - 1) * arrivals.cv**2
        case "uniform":
            gaps = np.ones(n - 1)
        case _:  # a burst, and a closed loop until its first request ends
            return np.zeros(n)
    return np.concatenate([[0.0], np.cumsum(gaps)]) / arrivals.rate


def draw_lengths(lengths: Lengths, n: int, rng: np.random.Generator) -> np.ndarray:
    """`n` token counts. A lognormal has the mean exp(mu + sigma**2 / 2), so mu is
    log(mean) - sigma**2 / 2; clipping to [low, high] afterwards moves the mean."""
    if lengths.kind == "fixed":
        drawn = np.full(n, lengths.mean)
    else:
        mu = np.log(lengths.mean) - lengths.sigma**2 / 2
        drawn = np.exp(mu + lengths.sigma * rng.standard_normal(n))
    return np.clip(np.rint(drawn), lengths.low, lengths.high).astype(np.int64)


# --- Checks ------------------------------------------------------------------------------


def _check(workload: Workload, seed: int, chat: Chat | None) -> None:
    arrivals, trace = workload.arrivals, workload.trace
    positive: dict[str, float] = {"requests": workload.requests}
    if arrivals.process in ("poisson", "gamma", "uniform"):
        positive["arrivals.rate"] = arrivals.rate
    if arrivals.process == "gamma":
        positive["arrivals.cv"] = arrivals.cv
    if arrivals.process == "closed":
        positive["arrivals.concurrency"] = arrivals.concurrency
    if trace.path:
        positive |= {"trace.length_scale": trace.length_scale, "trace.rate_scale": trace.rate_scale}
    if workload.shared < 0 or workload.turns < 1 or workload.think_s < 0:
        raise ConfigError(
            f"`workload` has `shared` {workload.shared}, `turns` {workload.turns} and `think_s` "
            f"{workload.think_s}; they must be at least 0, 1 and 0"
        )
    for name, value in positive.items():
        if not value > 0:
            raise ConfigError(f"`workload.{name}` is {value}; it must be positive")
    if seed < 0:
        raise ConfigError(f"`seed` is {seed}; it must be 0 or more")
    if arrivals.process == "trace" and not trace.path:
        raise ConfigError(
            "`workload.arrivals.process` is `trace` but `workload.trace.path` is empty: "
            "set the path of a trace, or another process"
        )
    if workload.chat and chat is None:
        raise ConfigError("`workload.chat` is set but the model has no chat template: unset it")
    if trace.path and workload.phases:
        raise ConfigError("`workload.phases` shift lengths, but a trace gives them: unset one")
    starts = [0, *(phase.at for phase in workload.phases)]
    if starts != sorted(set(starts)):
        raise ConfigError(f"`workload.phases` begin at {starts[1:]}: let each begin after the last")
    for i, part in enumerate(() if trace.path else (workload, *workload.phases)):
        name = f"workload.phases[{i - 1}]" if i else "workload"
        _check_lengths(f"{name}.prompt", part.prompt)
        _check_lengths(f"{name}.output", part.output)


def _check_lengths(name: str, lengths: Lengths) -> None:
    if not 1 <= lengths.low <= lengths.high:
        raise ConfigError(
            f"`{name}` has `low` {lengths.low} and `high` {lengths.high}; "
            "they must be 1 <= low <= high"
        )
    if not lengths.mean > 0 or not lengths.sigma >= 0:
        raise ConfigError(
            f"`{name}` has `mean` {lengths.mean} and `sigma` {lengths.sigma}; "
            "the mean must be positive, sigma 0 or more"
        )


# --- Arrivals and lengths ----------------------------------------------------------------


def _rng(seed: int, *concern: int) -> np.random.Generator:
    return np.random.default_rng(np.random.SeedSequence(seed, spawn_key=concern))


def _trace_rows(trace: Trace) -> tuple[list[TraceRow], int]:
    """Rows of the trace with its scales applied, and how many had no output and are left out."""
    rows = _READERS[trace.format](trace.path)
    kept = [
        TraceRow(
            row.arrival_s / trace.rate_scale,
            max(1, round(row.prompt_len * trace.length_scale)),
            max(1, round(row.output_len * trace.length_scale)),
            row.blocks,
        )
        for row in rows
        if row.output_len > 0
    ]
    dropped = len(rows) - len(kept)
    if not kept:
        raise ConfigError(
            f"all {dropped} rows of `{trace.path}` have no output: set another `trace.path`"
        )
    if dropped:
        logging.warning(
            "%s: %d of %d rows have no output; left out", trace.path, dropped, len(rows)
        )
    return kept, dropped


def _shapes(workload: Workload, seed: int, rows: list[TraceRow]) -> list[TraceRow]:
    """Arrival and lengths of each request. Rows drawn from a trace keep their prompt and output
    together but not their blocks: a row drawn twice is not the same prompt twice."""
    n = workload.requests
    if workload.arrivals.process == "trace":
        return rows[:n]
    arrivals = arrival_times(workload.arrivals, n, _rng(seed, _ARRIVALS)).tolist()
    if rows:
        drawn = [rows[i] for i in _rng(seed, _TRACE_ROWS).integers(len(rows), size=n)]
        lengths = [(row.prompt_len, row.output_len) for row in drawn]
    else:
        prompts = draw_lengths(workload.prompt, n, _rng(seed, _PROMPT_LENGTHS))
        outputs = draw_lengths(workload.output, n, _rng(seed, _OUTPUT_LENGTHS))
        for phase in workload.phases:
            prompts[phase.at :] = _from(phase.prompt, phase.at, n, _rng(seed, _PROMPT_LENGTHS))
            outputs[phase.at :] = _from(phase.output, phase.at, n, _rng(seed, _OUTPUT_LENGTHS))
        lengths = zip(prompts.tolist(), outputs.tolist(), strict=True)
    return [TraceRow(t, *pair) for t, pair in zip(arrivals, lengths, strict=True)]


def _from(lengths: Lengths, at: int, n: int, rng: np.random.Generator) -> np.ndarray:
    """Those that requests `at` to n would have if the whole run had these lengths."""
    return draw_lengths(lengths, n, rng)[at:]


def _fit(shapes: list[TraceRow], context: int, template: int) -> tuple[list[TraceRow], int]:
    """Shapes that fit the context, and how many were clipped. A prompt keeps at least one token
    beside the `template` tokens of a chat and of what all prompts share."""
    shortest = template + 1
    if context <= shortest:
        raise ConfigError(
            f"`model.context` is {context}; a prompt of {shortest} and one token need more"
        )
    short = min(row.prompt_len for row in shapes)
    if short < shortest:
        raise ConfigError(
            f"a prompt of {short} tokens does not hold the {template} of the chat template and of "
            f"`workload.shared` and one more: ask for prompts of at least {shortest} or unset those"
        )
    fitted = []
    for row in shapes:
        output_len = min(row.output_len, context - shortest)
        prompt_len = min(row.prompt_len, context - output_len)
        fitted.append(msgspec.structs.replace(row, prompt_len=prompt_len, output_len=output_len))
    clipped = sum(new != old for new, old in zip(fitted, shapes, strict=True))
    if clipped:
        logging.warning("%d of %d requests cut to a context of %d", clipped, len(shapes), context)
    return fitted, clipped


def _requests(
    workload: Workload,
    seed: int,
    shapes: list[TraceRow],
    prompts: Sequence[Sequence[int]],
    stop_tokens: tuple[int, ...],
) -> tuple[Request, ...]:
    seeds = _rng(seed, _SAMPLING).integers(2**31, size=len(shapes)).tolist()
    return tuple(
        Request(
            id=rid,
            arrival_ns=round(row.arrival_s * 1e9),
            prompt_len=row.prompt_len,
            sampling=SamplingParams(
                max_tokens=row.output_len,
                temperature=workload.temperature,
                top_k=workload.top_k,
                top_p=workload.top_p,
                seed=seeds[rid],
                stop_tokens=stop_tokens,
            ),
            client_id=f"c{rid}",
            prompt=tuple(prompt),
        )
        for rid, (row, prompt) in enumerate(zip(shapes, prompts, strict=True))
    )


# --- Text --------------------------------------------------------------------------------


@functools.cache
def documentation() -> tuple[str, tuple[int, ...]]:
    """The prose of the language reference, as the standard library ships it for `help()`, each
    paragraph once; and where its sentences start. It is the same for one release of Python."""
    blocks = (block for name in sorted(topics) for block in topics[name].split("\n\n"))
    paragraphs = dict.fromkeys(" ".join(block.split()) for block in blocks)
    # Code, grammar and tables do not both begin and end like a sentence.
    prose = [p for p in paragraphs if p[:1].isupper() and p.endswith(".")]
    text = "\n\n".join(prose) + "\n\n"
    starts = re.finditer(r"(?:\A|\n\n|[.!?] )(?=[A-Z])", text)
    return text, tuple(match.end() for match in starts)


def _stdlib(seed: int, encode: Encode) -> Write:
    """Pieces of `documentation`, each from a sentence of its own until all have had their turn."""
    text, starts = documentation()
    order = _rng(seed, _TEXT).permutation(len(starts))

    def write(number: int, count: int, heading: str) -> list[int]:
        start = starts[order[number % len(order)]]
        chars = 5 * count + 64  # most often enough; the text begins again where it ends
        while True:
            piece = (text * (1 + (start + chars) // len(text)))[start : start + chars]
            tokens = encode(heading + piece)
            if len(tokens) >= count:
                return tokens[:count]
            chars *= 2

    return write


def _random(seed: int, vocab: int) -> Write:
    def write(number: int, count: int, heading: str) -> list[int]:
        return _rng(seed, _TEXT, number).integers(vocab, size=count).tolist()

    return write


def _prompts(
    shapes: list[TraceRow], scale: float, frame: tuple[list[int], list[int]], write: Write
) -> list[list[int]]:
    """Prompts of exactly the wanted lengths, the chat template's tokens counted.

    Where a trace names blocks, equal ids give equal tokens. An id stands at the same place in
    every prompt (it hashes all that came before), so the block at place i covers the tokens
    [round(512 * i * scale), round(512 * (i + 1) * scale)): for any `scale`, prompts that shared
    k blocks share round(512 * k * scale) tokens, less what the end of a prompt cuts off.
    Different ids give different tokens as long as a scaled block has room for its number.
    """
    head, tail = frame
    write_block = functools.cache(lambda block, count: write(block, count, f"[{block}] "))
    prompts = []
    for number, row in enumerate(shapes):
        count = row.prompt_len - len(head) - len(tail)
        if row.blocks:
            bounds = [round(BLOCK * i * scale) for i in range(len(row.blocks) + 1)]
            body = []
            for block, (begin, end) in zip(row.blocks, pairwise(bounds), strict=True):
                if begin < count:
                    body += write_block(block, end - begin)
            body = body[:count]
        else:
            body = write(number, count, "")
        prompts.append(head + body + tail)
    return prompts


def _chat_frame(encode: Encode, chat: Chat) -> tuple[list[int], list[int]]:
    """The tokens that the template puts before and after what the user says."""
    one, other = encode(chat("a")), encode(chat("0"))
    return _common(one, other), _common(one[::-1], other[::-1])[::-1]


def _common(one: list[int], other: list[int]) -> list[int]:
    """The prefix that two lists share."""
    pairs = zip(one, other, strict=False)
    return [a for a, _ in takewhile(lambda pair: pair[0] == pair[1], pairs)]
