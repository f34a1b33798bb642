"""What is refused at submit: whatever could never be served, or would be too late, with the
numbers that say so."""

from collections.abc import Sequence
from typing import NamedTuple

from pdjax.core.config import SLO, Estimate
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


def why_rejected(slo: SLO, estimate: Estimate, ttft_s: float, decoding: float) -> str:
    """One line for the client where its objectives would be missed, or nothing: it can expect its
    first token after `ttft_s`, and to decode beside `decoding` others (Mooncake's early rejection,
    arXiv 2407.00079, section 7)."""
    if ttft_s > slo.ttft_s:
        return f"the first token would come after {ttft_s:.3g} s; the objective is {slo.ttft_s:g} s"
    tpot_s = estimate.decode_step_s + estimate.decode_request_s * (decoding + 1)
    if tpot_s > slo.tpot_s:
        return (
            f"a token would take {tpot_s:.3g} s beside {decoding:g} requests; the objective is "
            f"{slo.tpot_s:g} s"
        )
    return ""


def still_decoding(remaining: Sequence[int], estimate: Estimate, after_s: float) -> int:
    """How many of the requests with these tokens to come will not have ended `after_s` from now,
    if they all decode together until then."""
    step_s = estimate.decode_step_s + estimate.decode_request_s * len(remaining)
    return sum(tokens * step_s > after_s for tokens in remaining)
