"""Builtin feature ``vote``: one predicate behind the scheduler's vote and the forward-time check.

Contract: a rank-local reason to run eagerly reaches a decision only through the vote. Where there
is a group, the forward-time check may not say no after the group said yes: such a contradiction
stops this rank, naming both sides, before it can leave the others in a collective. Decode votes
are the host's and are not touched. A draft model's runner neither votes nor is counted.

Adapters run on the scheduler's thread. They touch no device, with one exception: where the host
gathers on the device (0.5.16 without overlap schedule), the rows of a prefill are read with one
more copy to the host, beside the host's own.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import time
from collections.abc import Callable
from typing import Any

from sglang_bcg_dsa import hostfacts, reasons, vote
from sglang_bcg_dsa.buckets import bucket_for
from sglang_bcg_dsa.config import Config
from sglang_bcg_dsa.errors import LockstepError, StartupError, VetoError
from sglang_bcg_dsa.hooks import hookimpl
from sglang_bcg_dsa.installer import Installer
from sglang_bcg_dsa.predicate import BatchFacts, RunnerFacts, reasons_against
from sglang_bcg_dsa.progress import VOTE, Progress
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import BatchView, Feature, Forward, State
from sglang_bcg_dsa.rollcall import RollCall
from sglang_bcg_dsa.seams import SeamSet, resolve, resolve_owner

logger = logging.getLogger(__name__)

Hooks = Any
"""pluggy's hook relay; its calls are generated."""


class Step:
    """What only the vote needs of the scheduler step in flight; its number and verdict are in :class:`Progress`."""

    __slots__ = ("adapter_us", "against", "batch")

    def __init__(self) -> None:
        self.batch: Any = None
        self.against = 0
        """What this rank voted."""
        self.adapter_us = 0.0


class VoteFeature:
    """The vote, the forward-time check, and the record of each prefill forward."""

    name = "vote"

    def __init__(self, hooks: Hooks, progress: Progress, rolls: RollCall) -> None:
        self._hooks = hooks
        self._progress = progress
        self._rolls = rolls
        self.step = Step()
        self.runner: RunnerFacts | None = None
        self._enable_lora = False
        self._left_to_host = False
        self._group_checked = False
        self._late = 0
        """Reasons that only became known at forward time and hold for every later batch."""

    # ------------------------------------------------------------------ plugin hooks

    @hookimpl
    def bcg_feature(self, config: Config, seams: SeamSet) -> Feature:
        if "runner.local" in seams:
            return Feature(self.name, State.EXTENDED, "takes over SGLang's vote and adds the reasons to it")
        return Feature(self.name, State.SUPPLIED, "SGLang votes on the forward mode alone; the plugin adds the rest")

    @hookimpl
    def bcg_install(self, config: Config, seams: SeamSet, reasons: ReasonTable, installer: Installer) -> None:
        self._seams = seams
        self._reasons = reasons
        self._ballot = seams.field("vote.ballot")
        self._rows = seams.field("vote.rows")
        self._verdict_flag = seams.field("forward.verdict")
        self._host_has_predicate = "runner.local" in seams
        self._columns = probe_columns(seams)
        self._get_parallel = resolve(seams["parallel"])
        self._vetoed = bool(self._hooks.bcg_replay_veto.get_hookimpls())
        self._warned_of_unasked = False
        installer.around("vote.batch", self.on_batch)
        installer.around("vote.gather", self.on_gather)
        installer.around("forward.decide", self.on_decide)
        installer.after("runner.init", self.on_runner)

    # ------------------------------------------------------------------ schedule time

    def on_batch(self, original: Callable[..., Any], adapter: Any, local_batch: Any) -> Any:
        """A rank is about to vote on ``local_batch`` (None when it has nothing to run)."""
        step, progress = self.step, self._progress
        progress.step += 1
        progress.verdict = None
        step.batch, step.against, step.adapter_us = local_batch, 0, 0.0
        try:
            return original(adapter, local_batch)
        finally:
            step.batch = None

    def on_gather(self, original: Callable[..., Any], info: Any, *args: Any, **kwargs: Any) -> None:
        """Write this rank's vote into its row, let the host gather, read all votes."""
        start = time.perf_counter()
        if not self._group_checked:
            self._check_group(*args, **kwargs)
        against = self.step.against = self._against(info)
        if against:
            setattr(info, self._ballot, False)
        prefill = bool(info.is_extend_in_batch)
        info.is_extend_in_batch = vote.encode(prefill, against)
        before = time.perf_counter()
        mark = self._progress.enter(VOTE)
        try:
            original(info, *args, **kwargs)
        except RuntimeError as error:
            raise self._broken_vote(error) from error
        finally:
            self._progress.leave(mark)
        after = time.perf_counter()
        if info.is_extend_in_batch:
            self._conclude(info)
        self.step.adapter_us += (before - start + time.perf_counter() - after) * 1e6

    def _against(self, info: Any) -> int:
        """This rank's reasons against replaying its batch; idle ranks have none."""
        batch = self.step.batch
        host_yes = bool(getattr(info, self._ballot))
        if self._left_to_host or batch is None or batch.forward_mode.is_idle():
            return 0 if host_yes else self._unexplained()
        facts = hostfacts.of_schedule_batch(batch, info.num_tokens, self._alignment, self.runner, convertible=host_yes)
        against = reasons_against(facts, self.runner) | self._late
        if self.runner is not None and self.runner.pads_to_group:
            against &= ~reasons.PADDING
        if facts.prefill and self._vetoed:
            against |= self._vetoes(BatchView(facts, self._bucket(facts.num_tokens), batch))
        return against or (0 if host_yes else self._unexplained())

    def _conclude(self, info: Any) -> None:
        """Read the gathered votes, once some rank prefills."""
        tokens, prefill, ballot = self._columns["tokens"], self._columns["prefill"], self._columns["ballot"]
        rows = getattr(info, self._rows)
        votes = [
            vote.decode(rank, row[tokens], row[prefill], row[ballot] != 0) for rank, row in enumerate(rows.tolist())
        ]
        if len(votes) < self._ranks:
            raise LockstepError(
                f"the vote of step {self._progress.step} had {len(votes)} participants, but there are {self._ranks} DP "
                "ranks: it went over the wrong process group"
            )
        verdict = vote.tally(self._progress.step, votes, self.runner, self._alignment)
        if verdict.group_against:
            # Every rank finds the same in the same rows; the host, which did not look, is told.
            setattr(info, self._ballot, False)
        if verdict.against:
            # The reasons were ours to read; later readers of the rows expect 0 or 1.
            rows[:, prefill].clamp_(max=1)
        if verdict.replay != bool(getattr(info, self._ballot)):
            raise LockstepError(
                f"step {verdict.step}: SGLang reduced the votes to {getattr(info, self._ballot)}, but they say "
                f"{verdict.replay}: {vote.describe(verdict, self._reasons)}; the vote did not reach all ranks"
            )
        self._progress.verdict = verdict
        self._hooks.bcg_verdict(verdict=verdict)

    def _check_group(self, device: Any = None, group: Any = None, *args: Any, **kwargs: Any) -> None:
        """Once, before the first gather: the group must hold a rank of every DP rank."""
        self._group_checked = True
        if group is None:
            return
        import torch.distributed as dist

        members, dp = dist.get_process_group_ranks(group), self._progress.dp_ranks
        held = {dp[member] for member in members} if dp else set(range(len(members)))
        if missing := set(range(self._ranks)) - held:
            raise LockstepError(
                f"the vote goes over rank {', '.join(map(str, members))}, {len(members)} participants, but there are "
                f"{self._ranks} DP ranks: DP rank {', '.join(map(str, sorted(missing)))} would not be asked. It is the "
                "wrong process group; please report it with the server's arguments"
            )

    # ------------------------------------------------------------------ forward time

    def on_decide(self, original: Callable[..., Any], runner: Any, forward_batch: Any) -> bool:
        """The forward-time check. Returns whether this forward replays."""
        if self.runner is None or not is_ours(runner):
            return bool(original(runner, forward_batch))
        start = time.perf_counter()
        step, verdict = self.step, self._progress.verdict
        agreed = forward_batch.global_num_tokens_cpu is None or bool(getattr(forward_batch, self._verdict_flag))
        facts = hostfacts.of_forward_batch(forward_batch, self.runner, runner._has_inactive_dp_rank(forward_batch))
        against = reasons_against(facts, self.runner)
        if verdict is None:
            step.adapter_us = 0.0
            if self._may_ask_vetoes_alone and facts.prefill:
                against |= self._vetoes(BatchView(facts, self._bucket(facts.num_tokens), forward_batch))
        if agreed and not against and self._host_has_predicate and not original(runner, forward_batch):
            against = self._unexplained()
        if verdict is not None and agreed and against:
            self._tolerate_or_stop(facts, against)
        replay = agreed and not against
        if verdict is not None and replay:
            self._same_bucket(verdict, forward_batch, facts.num_tokens)
        step.adapter_us += (time.perf_counter() - start) * 1e6
        if not agreed and verdict is not None:
            # What follows from the group's decision, such as ranks without tokens, is no reason for it.
            against = verdict.against
        if not facts.is_target_verify:
            self._report(facts.num_tokens, replay, against)
        return replay

    def _tolerate_or_stop(self, facts: BatchFacts, against: int) -> None:
        """The group agreed and this rank may not: stop, unless every rank sees the same or none can hang.

        * A rank of the group without tokens: all ranks read that off the same list of counts.
        * Nothing to run (hosts that gather no counts, where only MoE dispatch is coupled): this rank
          dispatches eagerly what the others dispatch in their breaks.
        * A hidden mode that speculation set after the vote: the same on all ranks that prefill. From
          now on it is part of this rank's vote.
        """
        if not facts.num_tokens:
            return
        if not self.runner or not self.runner.hidden_mode_scheduled:
            self._late |= against & reasons.HIDDEN_MODE
            against &= ~reasons.HIDDEN_MODE
        if against & ~reasons.INACTIVE_RANK:
            raise self._contradiction(f"may not now: {self._reasons.text(against)}")

    def _same_bucket(self, verdict: vote.Verdict, forward_batch: Any, run: int) -> None:
        """Where all ranks run the same length, their graphs hold collectives of one size: stop at another bucket.

        Ranks that gather no counts, or may run their own lengths (SUM_LEN), choose buckets of their own.
        """
        mode = forward_batch.dp_padding_mode
        if mode is None or not mode.is_max_len() or len(forward_batch.global_num_tokens_cpu or ()) < 2:
            return
        if (bucket := self._bucket(run)) != verdict.bucket:
            raise self._contradiction(f"would replay bucket {bucket} for the {run} tokens it has now")

    def _report(self, run: int, replay: bool, against: int) -> None:
        verdict = self._progress.verdict
        tokens = run
        if verdict is not None:
            tokens = verdict.votes[self._rank].tokens
        bucket = self._bucket(run) if replay else None
        self._hooks.bcg_forward(
            forward=Forward(replay, against, tokens, bucket or run, bucket, verdict, self.step.adapter_us)
        )

    def _broken_vote(self, error: RuntimeError) -> LockstepError:
        message = f"the vote of step {self._progress.step} failed ({error}): {self._rolls.call()}"
        logger.critical("sglang-bcg-dsa: %s", message)
        return LockstepError(message)

    def _contradiction(self, what: str) -> LockstepError:
        verdict = self._progress.verdict
        said = vote.describe(verdict, self._reasons) if verdict is not None else "votes unknown"
        message = (
            f"DP rank {self._rank}: the group agreed to replay step {self._progress.step}"
            f"{f', bucket {verdict.bucket}' if verdict is not None else ''}, but DP rank {self._rank}, which voted "
            f"{'no (' + self._reasons.text(self.step.against) + ')' if self.step.against else 'yes (no reasons)'}, {what}. "
            f"Votes: {said}. Stopping here: ranks on different paths would wait for each other in their next collective"
        )
        logger.critical("sglang-bcg-dsa: %s", message)
        return LockstepError(message)

    @hookimpl
    def bcg_state(self) -> dict[str, Any] | None:
        """How much padding is accepted: what a batch's bucket may be, in tokens and times the batch's."""
        if self.runner is None:
            return None
        return {"padding": {"factor": self.runner.padding_factor, "free": self.runner.padding_free}}

    # ------------------------------------------------------------------ start-up

    def on_runner(self, result: Any, runner: Any, model_runner: Any) -> None:
        """A prefill runner captured its graphs; note what they can serve."""
        if not is_ours(runner):
            # Another backend's graphs (full, tc_piecewise) are the host's to vote on; draft runners do not vote.
            self._left_to_host |= not model_runner.is_draft_worker
            if self.runner is not None and runner.has_mha_companion_layers and not self._host_has_predicate:
                # A draft's graphs follow the same verdict, and the host alone checks them: what they refuse is voted.
                self.runner = self.runner._replace(prefix=False)
            return
        self.runner = hostfacts.of_runner(runner, self._seams)
        self._enable_lora = bool(getattr(runner, "enable_lora", False))
        logger.info(
            "sglang-bcg-dsa: prefill graphs for %d buckets, %d to %d tokens",
            len(self.runner.ladder), self.runner.ladder[0], self.runner.ladder[-1],
        )  # fmt: skip

    # ------------------------------------------------------------------ small helpers

    def _vetoes(self, view: BatchView) -> int:
        mask = 0
        for reason in self._hooks.bcg_replay_veto(batch=view):
            try:
                mask |= self._reasons.bit(reason)
            except KeyError:
                raise VetoError(
                    f"a plugin vetoed with the reason {reason!r}, which no plugin declared; known: "
                    f"{', '.join(self._reasons.owners) or 'none'}; declare it in bcg_reasons"
                ) from None
        return mask

    @property
    def _may_ask_vetoes_alone(self) -> bool:
        """Without a vote a veto decides alone: sound in a world of one rank, a hang between TP ranks."""
        if not self._vetoed:
            return False
        alone = int(self._get_parallel().tp_size) == 1
        if not alone and not self._warned_of_unasked:
            self._warned_of_unasked = True
            logger.warning(
                "sglang-bcg-dsa: plugins' vetoes are not asked: tensor-parallel ranks without DP attention do not "
                "vote, and a veto on one of them would hang the others"
            )
        return alone

    def _unexplained(self) -> int:
        """The host said no and the predicate did not: name what is most likely."""
        if self._left_to_host:
            return reasons.HOST
        if self.runner is None:
            return reasons.NO_GRAPH_RUNNER
        return reasons.LORA if self._enable_lora else reasons.HOST

    def _bucket(self, tokens: int) -> int | None:
        return bucket_for(tokens, self.runner.ladder) if self.runner is not None else None

    @functools.cached_property
    def _alignment(self) -> int:
        """Attention-TP size. Read late, when the host has its groups, and once: it is fixed then."""
        return int(self._get_parallel().attn_tp_size)

    @functools.cached_property
    def _ranks(self) -> int:
        return int(self._get_parallel().attn_dp_size)

    @functools.cached_property
    def _rank(self) -> int:
        return int(self._get_parallel().attn_dp_rank)


def is_ours(runner: Any) -> bool:
    """Whether a prefill runner is the target model's and replays breakable graphs."""
    return not runner.model_runner.is_draft_worker and runner.prefill_backend_name == "breakable"


def probe_columns(seams: SeamSet) -> dict[str, int]:
    """Where the host puts tokens, prefill flag and ballot in the gathered row.

    A row of marked values is built with the host's own code, so a release that adds or moves
    columns needs no new table. Raises StartupError when a mark does not come back.
    """
    cls = resolve_owner(seams["vote.gather"])
    names = {"tokens": "num_tokens", "prefill": "is_extend_in_batch", "ballot": seams.field("vote.ballot")}
    needed = [f.name for f in dataclasses.fields(cls) if f.default is dataclasses.MISSING]
    marks = {name: 1001 + i for i, name in enumerate(needed)}
    row = cls(**marks)._get_local_tensor(device="cpu").tolist()
    columns = {}
    for role, name in names.items():
        if row.count(marks.get(name)) != 1:
            raise StartupError(
                f"{cls.__qualname__} does not gather {name} in a column of its own (row {row}); "
                "this SGLang is not supported by the vote feature: set [vote] enabled = false"
            )
        columns[role] = row.index(marks[name])
    return columns
