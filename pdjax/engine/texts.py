"""What the engine knows of each request: its prompt, its tokens so far, and when its text ends."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pdjax.core.events import Emitted
from pdjax.core.request import Request


@dataclass
class Text:
    request: Request
    tokens: list[int] = field(default_factory=list)
    ended: bool = False


class Texts:
    """One Text per request that arrived. Only the side that holds a request now writes to it.

    vocab: how many token ids there are. decode: token ids -> text, needed for stop strings only.
    """

    def __init__(self, vocab: int, decode: Callable[[Sequence[int]], str] | None = None):
        self._vocab = vocab
        self._texts: dict[int, Text] = {}
        self._decode = decode

    def __getitem__(self, rid: int) -> Text:
        return self._texts[rid]

    def add(self, request: Request) -> None:
        if len(request.prompt) != request.prompt_len:
            raise ValueError(
                f"request {request.id} says {request.prompt_len} prompt tokens and carries "
                f"{len(request.prompt)}: the engine needs the tokens themselves"
            )
        strange = next((t for t in request.prompt if not 0 <= t < self._vocab), None)
        if strange is not None:
            raise ValueError(
                f"request {request.id} has the prompt token {strange}, but the model's ids go "
                f"from 0 to {self._vocab - 1}: encode the prompt with the model's own tokenizer"
            )
        if request.sampling.stop and self._decode is None:
            raise ValueError(
                f"request {request.id} has `stop` strings, but the engine has no tokenizer: "
                "give Engine a `decode`, or use `stop_tokens`"
            )
        self._texts[request.id] = Text(request)

    def known(self, rid: int, tokens: int) -> None:
        """Forgets all but the first `tokens` tokens, which the client has: later ones were
        sampled by steps that got lost, and will be sampled again."""
        text = self._texts[rid]
        if len(text.tokens) > tokens:
            del text.tokens[tokens:]
            text.ended = False

    def finish(self, rid: int, tokens: int) -> None:
        """The text ends with its first `tokens` tokens, whatever steps under way still say."""
        self.known(rid, tokens)
        self._texts[rid].ended = True

    def extend(self, rid: int, at: int, tokens: Sequence[int]) -> Emitted:
        """Takes sampled tokens number `at` and on, up to the one that ends the text; those after it
        never were. One that the text already has stays as it is."""
        text = self._texts[rid]
        for token in tokens[max(len(text.tokens) - at, 0) :]:
            gap = at > len(text.tokens)
            if gap or text.ended or len(text.tokens) == text.request.max_tokens:
                break
            text.tokens.append(token)
            text.ended = self._ends(text)
        end = at + len(tokens)
        stopped = text.ended and end >= len(text.tokens)
        return Emitted(rid, tuple(text.tokens[at:end]), stopped)

    def _ends(self, text: Text) -> bool:
        sampling = text.request.sampling
        if text.tokens[-1] in sampling.stop_tokens:
            return True
        if not sampling.stop or self._decode is None:
            return False
        words = self._decode(text.tokens)
        return any(stop in words for stop in sampling.stop)
