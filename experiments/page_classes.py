"""Which page classes suit the lengths in a trace.

    python -m experiments.page_classes --trace=conversation_trace.jsonl --format=mooncake

Prints the cheapest choices of --count block sizes, what they waste per request and how many table
entries they need, and single page sizes to compare with. Takes a few seconds.
--of=total counts prompt and output, which is what a decode pool holds; --of=output the output.
For Mooncake's conversation trace it says 8, 32, 128 for outputs: 3.5 tokens wasted in 5.1 entries.
"""

from absl import flags
from rich.console import Console
from rich.table import Table

from experiments.flags import run
from pdjax.page_classes import score_classes
from pdjax.traces import read_azure, read_mooncake

READERS = {"mooncake": read_mooncake, "azure": read_azure}
TRACE = flags.DEFINE_string("trace", None, "A trace file.", required=True)
FORMAT = flags.DEFINE_enum("format", "mooncake", list(READERS), "The trace's format.")
OF = flags.DEFINE_enum("of", "output", ["output", "total"], "Which lengths.")
PAGE = flags.DEFINE_integer("page_size", 8, "The smallest block to consider.", lower_bound=1)
COUNT = flags.DEFINE_integer("count", 3, "How many classes.", lower_bound=1)
ENTRY = flags.DEFINE_float("entry_tokens", 1.0, "Empty tokens that are worth one entry less.")


def main() -> None:
    rows = READERS[FORMAT.value](TRACE.value)
    prompts = OF.value == "total"
    lengths = [row.output_len + prompts * row.prompt_len for row in rows]
    table = Table("classes", "waste, tokens", "waste, %", "entries", "cost, tokens")
    for count in sorted({1, COUNT.value}):
        table.add_section()
        found = score_classes(lengths, PAGE.value, count=count, entry_tokens=ENTRY.value)
        for c in found[:8]:
            sizes = ", ".join(map(str, c.classes))
            costs = (f"{x:.2f}" for x in (c.waste, 100 * c.waste_share, c.entries, c.cost))
            table.add_row(sizes, *costs)
    Console().print(table)


if __name__ == "__main__":
    run(main)
