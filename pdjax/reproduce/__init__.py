"""Published numbers beside what comes out here: a module per system, a function per figure.

A function returns a Reproduction: rows that say what was published, what was obtained and by what
criterion the two agree, and a figure. A config in configs/papers names one such function. "Not
reproduced" is a result like any other; constants that were fitted to it are named in its notes.
"""

from pdjax.reproduce.result import (
    Reproduction,
    Row,
    beside,
    drawn,
    judged,
    near,
    trace_file,
)

__all__ = ["Reproduction", "Row", "beside", "drawn", "judged", "near", "trace_file"]
