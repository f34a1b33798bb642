"""What is refused at submit: whatever could never be served, with the numbers that say so."""

from collections.abc import Sequence
from typing import NamedTuple

from pdjax.core.request import Request


class Need(NamedTuple):
    """KV memory that the request would need in a pool of `pages` pages."""

    tokens: int
    pool: str
    pages: int
    page_size: int


def why_refused(request: Request, context: int, needs: Sequence[Need]) -> str:
    """One line for the client, or nothing when the request can be served."""
    if request.prompt_len == 0:
        return "the prompt is empty: send at least one token"
    if request.max_tokens < 1:
        return f"`max_tokens` is {request.max_tokens}: ask for at least 1"
    total = request.prompt_len + request.max_tokens
    if total > context:
        return (
            f"prompt {request.prompt_len} + max_tokens {request.max_tokens} = {total} tokens "
            f"exceed the context of {context}"
        )
    for need in needs:
        pages = -(-need.tokens // need.page_size)
        if pages > need.pages:
            return (
                f"the request needs KV memory for {need.tokens} tokens ({pages} pages of "
                f"{need.page_size}), but pool `{need.pool}` has {need.pages} pages in all"
            )
    return ""
