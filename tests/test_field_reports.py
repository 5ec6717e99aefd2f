"""What went wrong for people who run this: each reported input, what must come of it here, and where that is shown.

Numbers are those of the list of inputs worth reproducing; ``S#`` is a thread of sgl-project/sglang,
``D#`` of deepseek-ai/DeepEP. A row either runs its check here, or points to the tests that do, which
must exist; some do both.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from sglang_bcg_dsa import reasons
from sglang_bcg_dsa.breaks import Break
from sglang_bcg_dsa.hooks.attention import local_tokens
from sglang_bcg_dsa.ledger import Ledger
from sglang_bcg_dsa.predicate import BatchFacts, RunnerFacts, reasons_against
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Forward
from sglang_bcg_dsa.vote import Verdict, Vote, describe, tally
from tests.conftest import ROOT

DEEPEP_SECONDS = 100.0
"""How long DeepEP's dispatch waits for other ranks; compiled in (``NUM_CPU_TIMEOUT_SECS``)."""


class Report(NamedTuple):
    """One input: where it was reported, what it is, what must come of it."""

    number: str
    threads: str
    given: str
    outcome: str
    check: Callable[[], Any] | None
    shown_by: tuple[str, ...] = ()


def votes(*tokens: int, **no: int) -> list[Vote]:
    """Prefills of so many tokens, 0 idle; ``rN=mask``: rank N refuses for these reasons."""
    return [Vote(r, n, n > 0, f"r{r}" not in no, no.get(f"r{r}", 0)) for r, n in enumerate(tokens)]


def group(*tokens: int, ladder: tuple[int, ...]) -> Verdict:
    return tally(1, votes(*tokens), RunnerFacts(ladder, padding_free=256, pads_to_group=True))


def idle_ranks() -> None:
    verdict = group(15, 0, 0, 0, ladder=(4, 8, 16))
    assert (verdict.replay, verdict.bucket, verdict.against) == (True, 16, 0)
    assert [local_tokens(v.tokens, 16, 0) for v in verdict.votes] == [15, 0, 0, 0], "made-up rows are no tokens"


def geometry() -> None:
    verdict = group(7, 200, ladder=(8, 64, 256))
    assert (verdict.replay, verdict.bucket) == (True, 256), "one bucket for both"
    assert group(7, 300, ladder=(8, 64, 256)).bucket is None


def two_reasons() -> None:
    cast = votes(*[16] * 8, r2=reasons.HIDDEN_MODE, r5=reasons.PADDING)
    line = describe(tally(1, cast, RunnerFacts((16,))), ReasonTable())
    assert "DP rank 2 no (hidden_mode)" in line
    assert "DP rank 5 no (padding)" in line
    assert line.count(" no (") == 2


def padding() -> None:
    sparse, tiny = RunnerFacts((2816, 3072, 8192)), RunnerFacts((4, 16))
    assert reasons_against(BatchFacts(1, 3208), sparse) == reasons.PADDING
    assert reasons_against(BatchFacts(1, 2700), sparse) == 0
    assert reasons_against(BatchFacts(1, 5), tiny) == reasons.PADDING
    # Where the host leaves the decision to us, what is cheap is not refused.
    assert reasons_against(BatchFacts(1, 5), tiny._replace(padding_free=256)) == 0


def skew() -> None:
    verdict = group(100, 4000, ladder=(128, 4096))
    assert (verdict.replay, verdict.bucket) == (True, 4096)
    ledger = Ledger(ReasonTable())
    ledger.count_forward(Forward(True, 0, verdict.votes[0].tokens, 4096, 4096, verdict, 1.0))
    assert ledger.snapshot()["tokens"] == {"real": 100, "padded": 3996}, "the small rank's padding is seen, not hidden"


def teardown_skew() -> None:
    """Four ranks on a fake clock; ending rank 3's segment takes 130 s. What each then waits for the last one."""

    def waits(barrier: bool) -> list[float]:
        clocks = [0.0] * 4
        arrived: list[float] = []
        for rank in range(4):

            class Engine:
                def end_segment(self, rank: int = rank) -> None:
                    clocks[rank] += 130.0 if rank == 3 else 1.0

                def add_break(self, run: Any) -> None: ...
                def begin_segment(self) -> None: ...

            # A barrier lets nobody go before the last has come: with the clocks fixed, at the longest teardown.
            meet = {"barrier": lambda rank=rank: clocks.__setitem__(rank, max(clocks[rank], 130.0))} if barrier else {}
            coupled = Break(
                lambda out, x: None, stub=lambda out, x, rank=rank: arrived.append(clocks[rank]), current_capture=Engine, **meet
            )  # type: ignore[misc]
            coupled(torch.empty(2), torch.ones(2))
        return [max(arrived) - at for at in arrived]

    assert max(waits(barrier=False)) == 129.0 > DEEPEP_SECONDS
    assert waits(barrier=True) == [0.0] * 4


REPORTS = (
    Report(
        "1",
        "S#31125 S#33871",
        "4 ranks, tokens [15, 0, 0, 0], DeepEP",
        "all replay 16; made-up rows count 0 tokens",
        idle_ranks,
        (
            "test_vote::test_an_idle_rank_does_not_veto_and_does_not_decide",
            "test_attention::test_the_mask_of_padded_rows_counts_this_rank_s_real_rows",
        ),
    ),
    Report(
        "3",
        "S#37561",
        "ranks with 7 and 200 tokens whose graphs hold a DP gather",
        "one bucket, and another one stops the rank",
        geometry,
        (
            "test_adapters::test_a_rank_that_would_replay_another_bucket_is_stopped",
            "test_vote::test_ranks_of_different_sizes_share_one_bucket",
        ),
    ),
    Report(
        "3, idle",
        "S#37561",
        "one rank busy, one idle",
        "no rank replays while another is eager",
        None,
        (
            "test_adapters::test_any_set_of_batches_gives_one_answer_on_every_rank",
            "test_adapters::test_a_rank_without_tokens_is_no_contradiction",
            "test_moe::test_votes_over_a_real_group_are_read_alike_and_followed_by_every_rank",
        ),
    ),
    Report(
        "4",
        "Infera#34",
        "dp = tp = 8, a vote over the attention-TP group",
        "an error: 1 participant, 8 DP ranks",
        None,
        (
            "test_adapters::test_a_group_that_does_not_hold_all_dp_ranks_is_refused_before_the_gather",
            "test_adapters::test_a_vote_over_the_wrong_group_is_an_error",
            "test_adapters::test_a_vote_that_did_not_reach_all_ranks_is_noticed",
        ),
    ),
    Report(
        "5",
        "S#25568 S#31487",
        "rank 2 denies for its hidden mode, rank 5 for padding",
        "both are named, with their reasons",
        two_reasons,
        (
            "test_vote::test_two_ranks_two_reasons",
            "test_adapters::test_reasons_reach_every_rank",
        ),
    ),
    Report(
        "7",
        "S#31487 S#40253",
        "3208 and 2700 on [2816, 3072, 8192], 5 on [4, 16]",
        "no, yes, and no only where the host decides",
        padding,
        (
            "test_vote::test_padding_at_its_edges",
            "test_vote::test_small_buckets_are_never_too_much",
        ),
    ),
    Report(
        "7, skew",
        "a reading of S#33871",
        "ranks [100, 4000]",
        "4096 on both; the padding is in the counters",
        skew,
        (
            "test_vote::test_padding_is_the_group_s_where_all_pad_to_the_largest",
        ),
    ),
    Report(
        "9",
        "S#37606 S#30584",
        "bucket 256, then 64, in one pool; churn; replay 256",
        "equal to eager: a break owns what it reads and writes. Reuse of pool memory needs a GPU, where this was not run",
        None,
        (
            "test_breaks::test_a_later_bucket_does_not_disturb_an_earlier_one",
            "test_breaks::test_a_break_holds_staging_and_nothing_of_the_pool",
        ),
    ),
    Report(
        "11",
        "S#31987 S#23185 D#678",
        "rank 3 ends its segment 130 s later",
        "with the barrier nobody waits in DeepEP",
        teardown_skew,
        (
            "test_breaks::test_ranks_meet_after_the_segment_is_torn_down_and_before_the_break",
            "test_moe::test_a_rank_that_does_not_come_is_named_by_each_that_waits",
        ),
    ),
    Report(
        "12",
        "S#38464",
        "an unknown hook target, or a target replaced later",
        "exit 2 with the target",
        None,
        (
            "test_startup::test_a_hook_that_did_not_take_stops_with_its_target",
            "test_startup::test_hooks_are_verified_in_force",
            "test_seams::test_a_changed_host_is_refused_by_the_seam_that_changed",
        ),
    ),
    Report(
        "12",
        "S#38464",
        "another plugin hooks the same method, or registers late",
        "ours stay in force",
        None,
        (
            "test_startup::test_verification_looks_through_other_plugins_wraps",
            "test_hooks::test_a_late_plugin_is_told_the_configuration",
        ),
    ),
    Report(
        "12",
        "S#38464",
        "a misspelt SGLANG_PLUGINS or --plugins",
        "exit 2 that names it",
        None,
        (
            "test_flags::test_a_plugin_that_sglang_shuts_out_cannot_be_named",
            "test_flags::test_bad_input_is_one_error",
        ),
    ),
    Report(
        "12",
        "S#38464",
        "a plugin that raises",
        "the start ends with its name",
        None,
        (
            "test_hooks::test_an_installed_plugin_that_is_wrong_stops_the_start",
        ),
    ),
    Report(
        "12",
        "S#21388",
        "a subclass in the host's place",
        "the host finds it by name and by kind",
        None,
        (
            "test_moe::test_the_host_finds_the_subclass_by_name_and_by_kind",
            "test_attention::test_a_backend_that_is_not_ours_stops_the_start",
        ),
    ),
    Report(
        "12",
        "S#21388",
        "a spawned child without the hooks",
        "named at start",
        None,
        (
            "test_rehearsal::test_a_fault_of_one_rank_is_named_within_seconds",
            "test_startup::test_a_rank_without_the_plugin_is_named_at_start",
        ),
    ),
)


@pytest.mark.parametrize("report", [r for r in REPORTS if r.check], ids=lambda r: f"{r.number}: {r.given}")
def test_a_reported_input_ends_well(report: Report) -> None:
    """The right value for the input that went wrong."""
    assert report.check is not None
    report.check()


@pytest.mark.parametrize("report", REPORTS, ids=lambda r: f"{r.number}: {r.given}")
def test_each_report_is_shown_somewhere(report: Report) -> None:
    """Every test that a row points to exists; every row has a check or points to one."""
    assert report.check or report.shown_by
    for node in report.shown_by:
        module, _, name = node.partition("::")
        tree = ast.parse((ROOT / "tests" / f"{module}.py").read_text())
        assert name in {f.name for f in tree.body if isinstance(f, ast.FunctionDef)}, node


def test_every_reported_input_has_a_row() -> None:
    """The list of inputs has these numbers; the rows together have them all."""
    assert {report.number.partition(",")[0] for report in REPORTS} == {"1", "3", "4", "5", "7", "9", "11", "12"}
