"""Records -> every number we report, each with one definition. Seconds, bytes, tokens.

A request's clock starts at its arrival time (when the client sent it, not when the loop saw it)
and a token's time is that of the StepDone event which brought it to the host. Tokens that one
step brings for one request arrive together: the gaps between them are 0. Tokens that come after
a request's Finish, or beyond the count it states, never reached the client and are ignored.

TTFT  first token minus arrival.
ITL   every gap between a request's consecutive tokens.
TPOT  (last token - first token) / (n - 1); undefined (NaN) for n = 1.
E2E   last token minus arrival.

TTFT and ITL are taken wherever a client saw the tokens; TPOT, E2E and stages only of completed
requests. The five stages of a completed request add up to its E2E, because each begins where the
one before ended:

prefill_queue     until the first Step with a Chunk of it is dispatched, loads left out
prefill           until the StepDone of its last chunk
transfer_exposed  from when it is prefilled and its last piece may leave until that has landed; a
                  cached prefix that is loaded before its prefill, or KV that comes back from host
                  memory, from its first Send until it has landed; what its first decode step
                  waited inside for pieces still on their way (streaming)
decode_queue      until the first Step with a Decode of it is dispatched
decode            until its last token

A preempted or retried request goes through them again, from that moment on: its stages are sums
over these passes, and what is done again counts in the stage that does it.
"""

from pdjax.metrics.lives import STAGES, LogError
from pdjax.metrics.moves import NS
from pdjax.metrics.outcomes import Outcomes, Tally, outcomes
from pdjax.metrics.pools import HOST, pool_config, pool_of
from pdjax.metrics.summary import (
    GROWTH,
    Attainment,
    attainment,
    attainment_of,
    devices,
    growth_of,
    in_system,
    queue_growth,
    summary,
)
from pdjax.metrics.tables import Run, analyse

__all__ = [
    "GROWTH",
    "HOST",
    "NS",
    "STAGES",
    "Attainment",
    "LogError",
    "Outcomes",
    "Run",
    "Tally",
    "analyse",
    "attainment",
    "attainment_of",
    "devices",
    "growth_of",
    "in_system",
    "outcomes",
    "pool_config",
    "pool_of",
    "queue_growth",
    "summary",
]
