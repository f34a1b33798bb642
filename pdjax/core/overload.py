"""Early rejection: whom the server would serve too late, by what it expects of itself."""

from pdjax.core.books import Books
from pdjax.core.config import SLO
from pdjax.core.policies.admission import still_decoding, why_rejected
from pdjax.core.policies.routing import expected_ttfts
from pdjax.core.state import Tracked


def why_too_late(b: Books, t: Tracked, slo: SLO) -> str:
    """Why a request that has just arrived would miss its objectives, or nothing."""
    if b.routing.reject == "never":
        return ""
    estimate = b.routing.estimate
    up = [i for i in b.prefillers if i.up]
    if not up:
        return ""
    loads = [b.load_with_cache(t, instance) for instance in up]
    ttft_s = min(expected_ttfts(estimate, b.cache.remote, t.length, loads))
    decoding = _decoding(b, ttft_s) if t.decodes else 0.0
    return why_rejected(slo, estimate, ttft_s, decoding)


def _decoding(b: Books, ttft_s: float) -> float:
    """Requests per decode instance: those there now, or those there when the prefill has ended,
    when some will have gone and those that are prefilled before it will have come."""
    decoders = [d for d in b.decoders if d.up]
    there = [b.requests[rid] for d in decoders for rid in d.members if b.requests[rid].prefilled]
    count = len(there)
    if b.routing.reject == "predicted":
        remaining = [t.request.max_tokens - t.generated for t in there]
        coming = sum(not t.prefilled and t.decodes for t in b.requests.values())
        count = still_decoding(remaining, b.routing.estimate, ttft_s) + coming
    return count / max(1, len(decoders))
