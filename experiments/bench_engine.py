"""The engine against its own programs, against transformers, and against the machine.

    python -m experiments.bench_engine --json=bench_engine.json

On SmolLM2-135M in float32, for each batch size and prompt length, in one run:
(a) how much longer a step of the live engine takes than the bare programs it dispatches;
(b) prefill and decode tokens/s over those of transformers on torch (same GGUF, float32, all
    cores, one static batch); needs the `peers` extra, and is left out without it;
(c) matmul FLOP/s and memory read bandwidth of this machine, and which share of the time is what
    the slower of the two would need for the least work.
Takes about 18 minutes on 2 cores; --batches=1 --prompts=128 takes one. Close other programs first.
"""

import importlib.util
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from tqdm import tqdm

from experiments.bench_common import JSON, Row, report, seconds
from experiments.flags import run, setup_devices
from pdjax.architecture import Architecture
from pdjax.core.config import SLO, Config, Model, Pool, Role, Transfer
from pdjax.core.loop import serve
from pdjax.core.request import Request, SamplingParams
from pdjax.engine import Engine
from pdjax.experiment import environment
from pdjax.metrics import analyse
from pdjax.programs.batch import Chunks, Slots, no_chunks, no_slots
from pdjax.programs.weights import Checkpoint, open_checkpoint
from pdjax.workload import Source

BATCHES = flags.DEFINE_list("batches", ["1", "8", "32"], "Batch sizes.")
PROMPTS = flags.DEFINE_list("prompts", ["128", "512", "2048"], "Prompt lengths, in tokens.")
DECODES = flags.DEFINE_integer("decodes", 20, "Decode steps that are timed.")

BUDGET = 2048  # prompt tokens per prefill step
PAGE = 16  # tokens per page
GROUPS = 5  # layer groups, as in configs/quickstart.py
SMALL = 4096  # prompt tokens up to which prefill is measured more than once


def main() -> None:
    setup_devices(1)
    checkpoint = open_checkpoint("smollm2")
    peer = Peer() if importlib.util.find_spec("transformers") else None
    limits = Limits()
    rows = [
        Row("matmul of 2048 x 2048, float32", limits.flops / 1e9, "GFLOP/s"),
        Row("memory read, matrix times vector", limits.bandwidth / 1e9, "GB/s"),
    ]
    shapes = [(int(b), int(p)) for b in BATCHES.value for p in PROMPTS.value]
    for batch, prompt in tqdm(shapes, desc="batch and prompt", unit="shape"):
        rows += measure(checkpoint, peer, limits, batch, prompt)
    report(rows, JSON.value, environment(Config(placements={"one": {"server": Role()}})))


def measure(
    checkpoint: Checkpoint, peer: "Peer | None", limits: "Limits", batch: int, prompt: int
) -> Iterator[Row]:
    """All rows of one shape."""
    name = f"batch {batch}, prompt {prompt}"
    ours = Ours(checkpoint, batch, prompt)
    (prefill_s, decode_s), (bare_prefill_s, bare_decode_s) = ours.live(), ours.bare()
    yield Row(
        f"{name}: prefill, engine / bare programs", prefill_s / bare_prefill_s, "x", "<= 1.05"
    )
    yield Row(
        f"{name}: decode step, engine / bare programs", decode_s / bare_decode_s, "x", "<= 1.05"
    )
    yield Row(f"{name}: prefill", batch * prompt / prefill_s, "tok/s")
    yield Row(f"{name}: decode", batch / decode_s, "tok/s")
    least_prefill_s, least_decode_s = limits.least(ours.engine.arch, batch, prompt)
    yield Row(f"{name}: prefill, share of the limit", least_prefill_s / prefill_s, "")
    yield Row(f"{name}: decode, share of the limit", least_decode_s / decode_s, "")
    del ours  # its pool may be gigabytes, and the peer's cache is as large
    if peer is not None:
        peer_prefill_s, peer_decode_s = peer.times(batch, prompt)
        yield Row(f"{name}: prefill, over transformers", peer_prefill_s / prefill_s, "x", ">= 1.0")
        yield Row(f"{name}: decode, over transformers", peer_decode_s / decode_s, "x", ">= 1.0")


class Ours:
    """A collocated engine for one static batch: live, and as the bare programs it dispatches."""

    def __init__(self, checkpoint: Checkpoint, batch: int, prompt: int):
        self.batch, self.prompt = batch, prompt
        self.rows = min(batch, max(1, BUDGET // prompt))
        self.steps = -(-batch // self.rows)
        outputs = DECODES.value + 2
        context = -(-(prompt + outputs) // PAGE) * PAGE
        role = Role(
            pool=Pool(tokens=(batch + 1) * context, page_size=PAGE),
            slots=batch,
            chunk=self.rows * prompt,
            prefills=self.rows,
        )
        config = Config(
            placements={"one": {"server": role}},
            model=Model(context=context),
            transfer=Transfer(groups=GROUPS),
        )
        self.engine = Engine(config, "one", checkpoint)
        self.instance = self.engine.instances["server/0"]
        rng = np.random.default_rng(0)
        texts = rng.integers(0, self.engine.arch.V, (batch, prompt)).tolist()
        # The opener keeps the instance busy while all others arrive, so that they fill their steps.
        opener = Request(0, 0, PAGE, SamplingParams(1), prompt=tuple(texts[0][:PAGE]))
        self.requests = [opener] + [
            Request(i, 0, prompt, SamplingParams(outputs), prompt=tuple(text))
            for i, text in enumerate(texts, 1)
        ]
        self.chunks, self.slots = self._static_batch()
        self.prefill_step()
        self.decode_step()

    def live(self) -> tuple[float, float]:
        """Seconds of the whole prefill, and of a decode step, of the live engine."""
        backend = self.engine.live()
        records = list(serve(Source(tuple(self.requests)), backend, self.engine.scheduler()))
        backend.close()
        run = analyse(records, self.engine.placement, SLO())
        ended = run.steps.groupby("kind")["ended_s"].apply(np.asarray)
        assert len(ended["prefill"]) == self.steps + 1, "the prompts did not fill their steps"
        return float(np.ptp(ended["prefill"])), float(np.median(np.diff(ended["decode"])))

    def bare(self) -> tuple[float, float]:
        """The same of the programs alone, one after the other."""
        times = 3 if self.batch * self.prompt <= SMALL else 1
        return (
            seconds(self.prefill_step, times) * self.steps,
            seconds(self.decode_step, DECODES.value),
        )

    def prefill_step(self) -> None:
        jax.block_until_ready(self.instance.run(None, self.chunks))

    def decode_step(self) -> None:
        jax.block_until_ready(self.instance.run(self.slots, None))

    def _static_batch(self) -> tuple[Chunks, Slots]:
        empty = self.instance.pool.empty_table
        table_Bn = np.arange(self.batch * len(empty), dtype=np.int32).reshape(self.batch, -1)
        chunks = no_chunks(self.rows, self.prompt, empty)
        chunks.tokens_CT[:] = [r.prompt for r in self.requests[1 : self.rows + 1]]
        chunks.table_Cn[:], chunks.length_C[:] = table_Bn[: self.rows], self.prompt
        slots = no_slots(self.batch, empty)
        slots.table_Bn[:], slots.count_B[:] = table_Bn, 1
        slots.position_B[:] = self.prompt + DECODES.value // 2
        return chunks, slots


class Limits:
    """What this machine can do, measured."""

    def __init__(self):
        key = jax.random.key(0)
        square = jax.random.normal(key, (2048, 2048))
        product = jax.jit(jnp.matmul)
        self.flops = (
            2 * 2048**3 / seconds(lambda: jax.block_until_ready(product(square, square)), 9)
        )
        tall = jax.random.normal(key, (16384, 8192))
        vector = jax.random.normal(key, (1, 16384))
        self.bandwidth = tall.nbytes / seconds(
            lambda: jax.block_until_ready(product(vector, tall)), 9
        )

    def least(self, arch: Architecture, batch: int, prompt: int) -> tuple[float, float]:
        """Seconds that prefill, and a decode step, need at these limits: each the larger of its
        FLOPs (matrices, attention over half of S in prefill, a head per sequence) and its bytes
        (weights once per step, the KV that is read)."""
        layers = arch.parameters - arch.V * arch.D * (1 if arch.tied else 2)
        head = arch.V * arch.D
        attention = 4 * arch.L * arch.N * arch.H  # FLOPs per query and key
        token_bytes = 2 * arch.L * arch.K * arch.H * 4
        weights = 4 * (layers + head)
        tokens = batch * prompt
        flops = 2 * layers * tokens + 2 * head * batch + attention * tokens * prompt / 2
        steps = -(-tokens // BUDGET)
        prefill = max(flops / self.flops, steps * weights / self.bandwidth)
        flops = 2 * (layers + head) * batch + attention * tokens
        decode = max(flops / self.flops, (weights + tokens * token_bytes) / self.bandwidth)
        return prefill, decode


class Peer:
    """transformers on torch with the same GGUF in float32."""

    def __init__(self):
        import torch  # pyright: ignore[reportMissingImports]
        import transformers  # pyright: ignore[reportMissingImports]

        from pdjax.sources import find

        path = find("smollm2").path
        self.torch = torch
        transformers.utils.logging.disable_progress_bar()
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            str(path.parent), gguf_file=path.name, dtype=torch.float32
        ).eval()

    def times(self, batch: int, prompt: int) -> tuple[float, float]:
        """Seconds of prefill, and of a decode step, of one static batch."""
        torch = self.torch
        tokens = torch.randint(0, 49152, (batch, prompt))
        with torch.inference_mode():
            self.model(tokens[:1, :16])  # warm
            newest = {}

            def prefill() -> None:
                newest["out"] = self.model(tokens, use_cache=True, logits_to_keep=1)

            def decode() -> None:
                best = newest["out"].logits[:, -1].argmax(-1, keepdim=True)
                cache = newest["out"].past_key_values
                newest["out"] = self.model(best, past_key_values=cache)

            prefill_s = seconds(prefill, 3 if batch * prompt <= SMALL else 1)
            return prefill_s, seconds(decode, DECODES.value)


if __name__ == "__main__":
    run(main)
