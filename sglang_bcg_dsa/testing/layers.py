"""Votes and audit over real gloo processes, without a server: hundreds of rounds of what can happen to a rank.

Contract of a round: forked ranks get requests through SGLang's own broadcast, which comes from rank 0,
vote through its own row and gather on a gloo group, check each
forward with the plugin's hooks, and run one collective a forward, whose size and sum depend on what
the group agreed. One of them is killed, stopped, paused, slow, disagrees, stalls, spins or hangs at
a random step. Every sum is the right one; what is no fault changes nothing; any other ends the group
within :data:`END_SECONDS`, naming the rank, with a report of each rank that was not killed or
stopped where a stall is the cause. This process plays the launching one: told by SIGQUIT, or by the
end of a rank, it kills them all.

Forks are made of a process that has imported the host and started no thread.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import logging
import math
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

from sglang_bcg_dsa.activate import host_name
from sglang_bcg_dsa.seams import SeamSet, examine

LADDER = (16, 32, 64, 128)
STALL_SECONDS = 1.5
HARMLESS_SECONDS = 0.4
ANSWER_SECONDS = 2.0
END_SECONDS = 12.0
STEPS = 20
STEP_SECONDS = 0.02
_FOR_GOOD = 600.0
_STALL = ("stop", "stall", "spin", "hang")

# Kind: what the log has to say, with the rank filled in; nothing for what is no fault.
KINDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "kill": (),  # which rank ended is seen by the launching process
    "stop": ("rank {0} does not answer", "Rank {0} keeps the others waiting"),
    "pause": (),
    "slow": (),
    "disagree": ("DP rank {0}: the group agreed to replay", "which voted yes (no reasons), may not now: replace_embeds"),
    "bucket": ("DP rank {0}: the group agreed to replay", "would replay bucket"),
    "stall": ("Rank {0} keeps the others waiting", "rank {0} has not voted since"),
    "spin": ("rank {0} does not answer", "Rank {0} keeps the others waiting"),
    "hang": ("Rank {0} keeps the others waiting", "rank {0} runs a forward", "a forward does not end"),
}
_HARMLESS = frozenset({"none", "pause", "slow"})


class Round(NamedTuple):
    """One round's plan. ``moment``: seconds, for signals from outside; ``step``: for what a rank does itself."""

    number: int
    kind: str
    rank: int
    step: int
    moment: float
    seed: int


def run(ranks: int, seed: int, minutes: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Rounds for about ``minutes``, every kind as often as any other; what came of them, as ``chaos`` gives it."""
    seams = examine()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seam in (*seams.of("vote"), *seams.of("audit"), *seams.of("parallel")):
            importlib.import_module(seam.module)
    start, source = time.monotonic(), random.Random(seed)
    each: list[dict[str, Any]] = []
    problems: list[str] = []
    left: list[str] = []
    while not each or left or time.monotonic() - start < 60 * minutes:
        left = left or source.sample(sorted(KINDS), len(KINDS))
        plan = Round(
            len(each) + 1, left.pop(), source.randrange(ranks), source.randrange(STEPS // 2),
            source.uniform(0, STEPS * STEP_SECONDS / 2), source.randrange(1 << 30),
        )  # fmt: skip
        done = one_round(ranks, plan, seams)
        each.append(done)
        problems += [f"round {plan.number} ({plan.kind}, rank {plan.rank}): {text}" for text in done["problems"]]
        if done["problems"] or plan.number % 20 == 0:
            say(f"round {plan.number}: {'; '.join(done['problems']) or 'all as it should be so far'}")
    ends = [done["ended_after_seconds"] for done in each if done["ended_after_seconds"] is not None]
    return {
        "host": host_name(), "seed": seed, "rounds": len(each), "kinds": dict(Counter(done["kind"] for done in each)),
        "answers_compared": sum(done["compared"] for done in each), "slowest_end_seconds": max(ends, default=None),
        "problems": problems, "seconds": round(time.monotonic() - start, 1), "each": each,
    }  # fmt: skip


def one_round(ranks: int, plan: Round, seams: SeamSet) -> dict[str, Any]:
    """Fork the ranks, let it happen, see what comes of it, leave nothing behind."""
    told: list[float] = []
    before = signal.signal(signal.SIGQUIT, lambda number, frame: told.append(time.monotonic()))
    context = multiprocessing.get_context("fork")
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="bcg-dsa-layers-") as folder:
        came, counted = context.Value("d", 0.0), context.Array("i", ranks)
        processes = [
            context.Process(target=_rank, args=(rank, ranks, plan, folder, came, counted, seams), daemon=True)
            for rank in range(ranks)
        ]
        try:
            for process in processes:
                process.start()
            ended = _follow(plan, processes, told, came, counted)
        finally:
            for process in processes:
                process.kill()
            for process in processes:
                process.join(5)
            signal.signal(signal.SIGQUIT, before)
        log = (Path(folder) / "log").read_text(errors="replace")
    if any(process.is_alive() for process in processes):
        problems.append("a rank outlived its kill")
    codes = [process.exitcode for process in processes]
    if "WRONG" in log:
        problems.append("a collective gave another sum")
    if plan.kind in _HARMLESS:
        if told or any(codes):
            problems.append(f"ended over what is no fault (status {codes}): {log[-3000:]}")
    elif not came.value:
        problems.append(f"ended before its fault (status {codes}): {log[-3000:]}")
    elif ended is None:
        problems.append(f"still up {END_SECONDS:g} s after its fault: {log[-3000:]}")
    else:
        missing = [words for words in (words.format(plan.rank) for words in KINDS[plan.kind]) if words not in log]
        reports = [r for r in range(ranks) if r != plan.rank or plan.kind in ("stall", "hang")] if plan.kind in _STALL else []
        missing += [f"report of rank {r}" for r in reports if log.count(f"report of rank {r}: it") != 1]
        problems += [f"the log does not say once {words!r}: {log[-3000:]}" for words in missing]
    after = round(ended - came.value, 2) if ended is not None and came.value else None
    return {**plan._asdict(), "compared": sum(counted[:]), "ended_after_seconds": after, "problems": problems}


def _follow(plan: Round, processes: list[Any], told: list[float], came: Any, counted: Any) -> float | None:
    """Play the launching process until the ranks are done or must be ended; when that was, None if it never was."""
    start, blow = time.monotonic(), math.inf
    while True:
        now = time.monotonic()
        if blow == math.inf and min(counted):
            blow = now + plan.moment  # all have voted once: before that there is no group to speak of
        if told:
            return told[0]
        if any(process.exitcode for process in processes):
            return now
        if all(process.exitcode == 0 for process in processes):
            return None
        if now - (came.value or start) > END_SECONDS + (0 if came.value else 20):
            return None
        if plan.kind in ("kill", "stop", "pause") and now >= blow and not came.value:
            number = signal.SIGKILL if plan.kind == "kill" else signal.SIGSTOP
            os.kill(processes[plan.rank].pid, number)
            came.value = time.monotonic()
            if plan.kind == "pause":
                time.sleep(HARMLESS_SECONDS)
                os.kill(processes[plan.rank].pid, signal.SIGCONT)
        time.sleep(0.01)


# ---------------------------------------------------------------------- a rank


def _rank(rank: int, ranks: int, plan: Round, folder: str, came: Any, counted: Any, seams: SeamSet) -> None:
    """What a forked rank does; ends it with the status a scheduler's process would have."""
    log = os.open(f"{folder}/log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for target in (1, 2):
        os.dup2(log, target)
    logging.basicConfig(stream=sys.stderr, level=logging.WARNING, force=True)
    signal.signal(signal.SIGQUIT, signal.SIG_DFL)
    try:
        _serve(rank, ranks, plan, folder, came, counted, seams)
    except BaseException:  # as SGLang's scheduler does: say it, tell the launching process, end
        logging.exception("rank %d ends", rank)
        os.kill(os.getppid(), signal.SIGQUIT)
        os._exit(1)
    os._exit(0)


def _serve(rank: int, ranks: int, plan: Round, folder: str, came: Any, counted: Any, seams: SeamSet) -> None:
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import TCPStore

    from sglang_bcg_dsa import rollcall

    torch.set_num_threads(1)
    rollcall.ANSWER_SECONDS = ANSWER_SECONDS
    port = Path(folder) / "port"
    if rank == 0:
        store = TCPStore("127.0.0.1", 0, ranks, is_master=True, wait_for_workers=False)
        (Path(folder) / "port.new").write_text(str(store.port))
        (Path(folder) / "port.new").rename(port)
    else:
        while not port.exists():
            time.sleep(0.005)
        store = TCPStore("127.0.0.1", int(port.read_text()), ranks, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    layers = Layers(rank, ranks, seams)
    for step in range(STEPS):
        layers.step(step, plan, came)
        counted[rank] += 1
        time.sleep(STEP_SECONDS)
    # Nobody leaves while another still votes: the store ends with rank 0's process.
    dist.barrier()


class Layers:
    """One rank's vote and audit, wired to the host's row, gather and batches as the plugin wires them to the host."""

    def __init__(self, rank: int, ranks: int, seams: SeamSet) -> None:
        import torch
        from sglang.srt.managers.scheduler_components import dp_attn

        from sglang_bcg_dsa.config import Audit, Config
        from sglang_bcg_dsa.hooks.audit import AuditFeature
        from sglang_bcg_dsa.hooks.manager import add, build_manager
        from sglang_bcg_dsa.hooks.vote import VoteFeature
        from sglang_bcg_dsa.predicate import RunnerFacts
        from sglang_bcg_dsa.progress import Progress
        from sglang_bcg_dsa.reasons import ReasonTable
        from sglang_bcg_dsa.rollcall import RollCall

        self.rank, self.ranks = rank, ranks
        self.seams = seams
        manager, self.progress, table = build_manager(), Progress(), ReasonTable()
        rolls = RollCall(self.progress)
        self.vote = VoteFeature(manager.hook, self.progress, rolls)
        self.audit = AuditFeature(self.progress, rolls, dict, lambda: self.vote.runner)
        config = Config(audit=Audit(stall_seconds=STALL_SECONDS, exchange_seconds=10.0))
        for name, feature in (("vote", self.vote), ("audit", self.audit)):
            add(manager, name, feature)
            feature.bcg_install(
                config=config, seams=self.seams, reasons=table,
                installer=SimpleNamespace(around=lambda *a: None, after=lambda *a: None),  # type: ignore[arg-type]
            )  # fmt: skip
        parallel = SimpleNamespace(attn_tp_size=1, attn_dp_rank=rank, tp_rank=rank, tp_size=ranks, attn_dp_size=ranks, pp_size=1)
        self.vote._get_parallel = self.audit._get_parallel = lambda: parallel
        self.vote.runner = RunnerFacts(LADDER, pads_to_group="runner.local" not in self.seams)
        self.row = dp_attn.MLPSyncBatchInfo
        # The host asks its tensor-parallel group, which is not made here, who takes part: everybody.
        everybody = SimpleNamespace(active_ranks_cpu=torch.ones(ranks))
        for name, answer in (("get_tp_group", everybody), ("get_parallel", SimpleNamespace(tp_group=everybody))):
            mock.patch.object(dp_attn, name, lambda answer=answer: answer, create=True).start()
        self.audit.on_ready(None, None)

    def step(self, number: int, plan: Round, came: Any) -> None:
        """One scheduler step: requests from rank 0, a vote on this rank's batch, then the forward the group agreed on."""
        import torch.distributed as dist
        from sglang.srt.utils import broadcast_pyobj

        mine = plan.kind if plan.rank == self.rank and number >= plan.step and not came.value else ""
        source = random.Random(plan.seed * 1000 + number)
        # A fault of a forward needs one that replays; every rank draws every rank's batch.
        tokens = [source.choice((0, 0, 5, 17, 40, 90, 128, 300)) for _ in range(self.ranks)]
        if number % 3 == 0:
            tokens = [source.choice((17, 40, 90, 128)) for _ in range(self.ranks)]
        batch = schedule_batch(tokens[self.rank]) if tokens[self.rank] else None
        if mine in ("stall", "spin"):
            came.value = time.monotonic()
            time.sleep(_FOR_GOOD) if mine == "stall" else ctypes.PyDLL(None).sleep(int(_FOR_GOOD))
        self.audit.on_receive(broadcast_pyobj, [], self.rank, dist.group.WORLD)
        info = make_row(self.row, self.seams, self.ranks, tokens[self.rank])

        def gather(adapter: Any, local: Any) -> None:
            self.vote.on_gather(self.row.all_gather, info, device="cpu", group=dist.group.WORLD)

        self.vote.on_batch(gather, None, batch)
        if any(tokens):
            self.audit.on_run(self._forward, None, SimpleNamespace(forward_mode=mode()), number, tokens, mine, came)

    def _forward(self, scheduler: Any, batch: Any, number: int, tokens: list[int], mine: str, came: Any) -> None:
        import torch
        import torch.distributed as dist

        verdict = self.progress.verdict
        assert verdict is not None
        if mine == "slow":
            time.sleep(HARMLESS_SECONDS)
        agreed, replay = verdict.replay, False
        if agreed or tokens[self.rank]:
            run = verdict.bucket if agreed else tokens[self.rank]
            counts = [verdict.bucket] * self.ranks if agreed else tokens
            facts: dict[str, Any] = {}
            if agreed and mine in ("disagree", "bucket", "hang"):
                came.value = time.monotonic()
                if mine == "hang":
                    time.sleep(_FOR_GOOD)
                facts = {"replace_embeds": torch.zeros(1)} if mine == "disagree" else {}
                run = 16 if mine == "bucket" and verdict.bucket != 16 else 32 if mine == "bucket" else run
            live = forward_batch(self.seams, int(run or 0), counts, agreed, **facts)
            runner = SimpleNamespace(
                model_runner=SimpleNamespace(is_draft_worker=False), prefill_backend_name="breakable",
                _has_inactive_dp_rank=lambda fb: 0 in fb.global_num_tokens_cpu,
            )  # fmt: skip
            replay = self.vote.on_decide(lambda r, fb: True, runner, live)
        assert replay == agreed, "a rank did not do what its group agreed on"
        sums = torch.full(((verdict.bucket or 0) if replay else 7 * len(tokens),), float(self.rank + number))
        dist.all_reduce(sums)
        if not bool((sums == sum(rank + number for rank in range(self.ranks))).all()):
            logging.critical("WRONG sum in step %d", number)


def mode() -> Any:
    """The host's forward mode of a prefill."""
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    return ForwardMode.EXTEND


def make_row(row: Any, seams: Any, ranks: int, tokens: int) -> Any:
    """The host's row as it fills it before the gather."""
    values: dict[str, Any] = {f.name: 0 for f in dataclasses.fields(row) if f.default is dataclasses.MISSING}
    for name in ("dp_size", "num_dp_ranks"):
        if name in values:
            values[name] = ranks
    values |= {"tp_size": 1, "cp_size": 1, "num_tokens": tokens, "is_extend_in_batch": tokens > 0}
    values[seams.field("vote.ballot")] = True
    return row(**values)


def schedule_batch(tokens: int) -> Any:
    """A prefill batch of the host's, about to be voted on."""
    from sglang.srt.managers.schedule_batch import ScheduleBatch

    batch = ScheduleBatch(reqs=[object()])
    batch.forward_mode, batch.extend_num_tokens, batch.prefix_lens = mode(), tokens, [0]
    return batch


def forward_batch(seams: Any, run: int, counts: list[Any], agreed: bool, **facts: Any) -> Any:
    """A prefill batch of the host's, padded for its group."""
    import torch
    from sglang.srt.layers.dp_attention import DpPaddingMode
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

    zero = torch.zeros(1, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=mode(), batch_size=1, input_ids=torch.zeros(run, dtype=torch.int64), req_pool_indices=zero,
        seq_lens=zero, out_cache_loc=zero, seq_lens_sum=run,
    )  # fmt: skip
    batch.global_num_tokens_cpu, batch.extend_prefix_lens_cpu = counts, [0]
    batch.capture_hidden_mode = CaptureHiddenMode.NULL
    batch.dp_padding_mode = DpPaddingMode.MAX_LEN if agreed else DpPaddingMode.SUM_LEN
    for name, value in {seams.field("forward.verdict"): agreed, **facts}.items():
        setattr(batch, name, value)
    return batch
