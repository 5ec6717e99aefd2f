"""Vote and forward-time check over the host's real row, batches and gather; ranks are threads.

The gather's transport is the only part that is stood in for: each thread is a rank, and a barrier
carries the rows that the host itself built and will itself reduce.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sglang.srt.layers.dp_attention import DpPaddingMode
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler_components import dp_attn
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode

from sglang_bcg_dsa import hookimpl, reasons
from sglang_bcg_dsa.config import Config
from sglang_bcg_dsa.errors import LockstepError, VetoError
from sglang_bcg_dsa.hooks.manager import add, build_manager
from sglang_bcg_dsa.hooks.vote import VoteFeature, probe_columns
from sglang_bcg_dsa.predicate import RunnerFacts
from sglang_bcg_dsa.progress import Progress
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Forward
from sglang_bcg_dsa.rollcall import RollCall
from sglang_bcg_dsa.seams import SeamSet, examine
from sglang_bcg_dsa.vote import Verdict

SEAMS: SeamSet = examine()
BALLOT = SEAMS.field("vote.ballot")
FLAG = SEAMS.field("forward.verdict")
LADDER = (16, 32, 64, 128)
SUPPLIED = "runner.local" not in SEAMS
"""The host has no predicate of its own and pads all ranks to the largest."""
FACTS = RunnerFacts(LADDER, prefix=False, hidden_mode_exact=SUPPLIED, pads_to_group=SUPPLIED)


class Wraps:
    """An installer that keeps what it is given."""

    def around(self, key: str, wrap: Any) -> None: ...
    def after(self, key: str, wrap: Any) -> None: ...


class Observer:
    def __init__(self) -> None:
        self.verdicts: list[Verdict] = []
        self.forwards: list[Forward] = []

    @hookimpl
    def bcg_verdict(self, verdict: Verdict) -> None:
        self.verdicts.append(verdict)

    @hookimpl
    def bcg_forward(self, forward: Forward) -> None:
        self.forwards.append(forward)


class Rank:
    """One rank: a feature of its own, as in a process of its own."""

    def __init__(
        self, rank: int, *plugins: tuple[str, object], table: ReasonTable | None = None, tp: int = 4, world: int = 1
    ) -> None:
        self.rank = rank
        self.seen = Observer()
        manager = build_manager([("observer", self.seen), *plugins])
        self.progress = Progress()
        self.feature = VoteFeature(manager.hook, self.progress, RollCall(self.progress))
        add(manager, "vote", self.feature)
        self.feature.bcg_install(config=Config(), seams=SEAMS, reasons=table or ReasonTable(), installer=Wraps())  # type: ignore[arg-type]
        self.feature._get_parallel = lambda: SimpleNamespace(
            attn_tp_size=1, attn_dp_rank=rank, tp_rank=rank, tp_size=tp, attn_dp_size=world
        )
        self.feature.runner = FACTS

    def vote(self, batch: ScheduleBatch | None, world: int, host_yes: bool = True, **columns: Any) -> Any:
        tokens = 0 if batch is None else batch.extend_num_tokens or batch.batch_size()
        info = make_row(world, tokens, batch is not None and batch.forward_mode.is_extend(), host_yes)
        for name, value in columns.items():
            setattr(info, name, value)

        def prepare(adapter: Any, local_batch: Any) -> Any:
            self.feature.on_gather(dp_attn.MLPSyncBatchInfo.all_gather, info, "cpu", None)
            return local_batch

        self.feature.on_batch(prepare, None, batch)
        return info

    def decide(self, batch: ForwardBatch, host: bool = True) -> bool:
        runner = SimpleNamespace(
            model_runner=SimpleNamespace(is_draft_worker=False), prefill_backend_name="breakable",
            _has_inactive_dp_rank=lambda fb: len(fb.global_num_tokens_cpu or ()) > 1 and 0 in fb.global_num_tokens_cpu,
        )  # fmt: skip
        return self.feature.on_decide(lambda r, fb: host, runner, batch)

    def decide_with(self, runner: Any, batch: ForwardBatch) -> bool:
        """The forward-time check with a runner of the host's own class."""
        return self.feature.on_decide(lambda r, fb: True, runner, batch)


def make_row(world: int, tokens: int, prefill: bool, yes: bool) -> Any:
    """The host's row as it fills it before the gather."""
    import dataclasses

    values: dict[str, Any] = {
        f.name: 0 for f in dataclasses.fields(dp_attn.MLPSyncBatchInfo) if f.default is dataclasses.MISSING
    }
    for name in ("dp_size", "num_dp_ranks"):
        if name in values:
            values[name] = world
    values |= {"tp_size": 1, "cp_size": 1, "num_tokens": tokens, "is_extend_in_batch": prefill, BALLOT: yes}
    return dp_attn.MLPSyncBatchInfo(**values)


def schedule_batch(tokens: int, mode: ForwardMode = ForwardMode.EXTEND, **facts: Any) -> ScheduleBatch:
    batch = ScheduleBatch(reqs=[object()])
    batch.forward_mode = mode
    batch.extend_num_tokens = tokens
    batch.prefix_lens = [0]
    for name, value in facts.items():
        setattr(batch, name, value)
    return batch


def forward_batch(run: int, counts: list[int] | None, agreed: bool, **facts: Any) -> ForwardBatch:
    zero = torch.zeros(1, dtype=torch.int64)
    batch = ForwardBatch(
        forward_mode=ForwardMode.EXTEND, batch_size=1, input_ids=torch.zeros(run, dtype=torch.int64),
        req_pool_indices=zero, seq_lens=zero, out_cache_loc=zero, seq_lens_sum=run,
    )  # fmt: skip
    batch.global_num_tokens_cpu = counts
    batch.capture_hidden_mode = CaptureHiddenMode.NULL
    batch.extend_prefix_lens_cpu = [0]
    setattr(batch, FLAG, agreed)
    for name, value in facts.items():
        setattr(batch, name, value)
    return batch


@pytest.fixture(autouse=True)
def threads_are_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Carry rows between threads instead of processes; the host's own code reads and reduces them."""
    actives = SimpleNamespace(active_ranks_cpu=torch.ones(64), active_ranks=torch.ones(64))
    monkeypatch.setattr(dp_attn, "get_tp_group", lambda: actives, raising=False)
    monkeypatch.setattr(dp_attn, "get_parallel", lambda: SimpleNamespace(tp_group=actives), raising=False)

    def gather(out: torch.Tensor, row: torch.Tensor, group: Any = None) -> None:
        out.copy_(_local.group.gather(_local.rank, row))

    monkeypatch.setattr(dp_attn, "exchange_sync_rows", gather, raising=False)
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", gather)


_local = threading.local()


class Group:
    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world, timeout=10)
        self._rows: dict[int, torch.Tensor] = {}

    def gather(self, rank: int, row: torch.Tensor) -> torch.Tensor:
        self._rows[rank] = row
        self._barrier.wait()
        return torch.cat([self._rows[r] for r in sorted(self._rows)])


def together(ranks: list[Rank], batches: list[ScheduleBatch | None], **kwargs: Any) -> list[Any]:
    """All ranks vote on one step; their rows after the gather."""
    group = Group(len(ranks))

    def one(rank: Rank, batch: ScheduleBatch | None) -> Any:
        _local.group, _local.rank = group, rank.rank
        return rank.vote(batch, len(ranks), **kwargs)

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, ranks, batches))


RANKS = [Rank(rank) for rank in range(4)]

batches = st.one_of(
    st.none(),
    st.integers(1, 200).map(lambda n: schedule_batch(n)),
    st.integers(1, 8).map(lambda n: schedule_batch(n, ForwardMode.DECODE)),
    st.integers(1, 200).map(lambda n: schedule_batch(n, ForwardMode.MIXED)),
    st.integers(1, 130).map(lambda n: schedule_batch(n, prefix_lens=[3])),
    st.integers(1, 130).map(lambda n: schedule_batch(n, return_logprob=True)),
    st.integers(1, 130).map(lambda n: schedule_batch(n, input_embeds=torch.zeros(1))),
    st.integers(1, 130).map(lambda n: schedule_batch(n, replace_embeds=torch.zeros(1))),
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(batches, min_size=4, max_size=4))
def test_any_set_of_batches_gives_one_answer_on_every_rank(step: list[ScheduleBatch | None]) -> None:
    """Schedule-time votes and forward-time answers agree on every rank, and with the host's own reduction."""
    for rank in RANKS:
        rank.seen.verdicts.clear()
    # On the host a decode batch votes no; it is handed in as the host would.
    rows = together(RANKS, step, host_yes=all(b is None or b.forward_mode.is_extend() for b in step))
    verdicts = {rank.seen.verdicts[-1]._replace(step=0) if rank.seen.verdicts else None for rank in RANKS}
    assert len(verdicts) == 1
    assert len({bool(getattr(row, BALLOT)) for row in rows}) == 1
    verdict = verdicts.pop()
    prefills = [b for b in step if b is not None and b.forward_mode.is_extend()]
    assert (verdict is not None) == bool(prefills)
    assert all(row.is_extend_in_batch is bool(prefills) for row in rows)
    if verdict is None:
        return
    assert verdict.replay == bool(getattr(rows[0], BALLOT))
    counts = [v.tokens for v in verdict.votes]
    answers = []
    for rank, batch in zip(RANKS, step, strict=True):
        if verdict.replay:
            facts = {"forward_mode": batch.forward_mode} if batch else {}
            answers.append(rank.decide(forward_batch(verdict.bucket or 0, [max(counts)] * 4, True, **facts)))
        elif batch is not None and batch.forward_mode.is_extend():
            answers.append(rank.decide(forward_batch(batch.extend_num_tokens, counts, False)))
    assert set(answers) == {verdict.replay}


def test_reasons_reach_every_rank() -> None:
    """Each rank learns from the gathered row which rank refused, and all of its reasons."""
    together(RANKS, [schedule_batch(20), schedule_batch(500, input_embeds=torch.zeros(1)), None, schedule_batch(7)])
    for rank in RANKS:
        votes = rank.seen.verdicts[-1].votes
        padding = 0 if SUPPLIED else reasons.PADDING
        assert [v.against for v in votes] == [0, reasons.INPUT_EMBEDS | reasons.ABOVE_LADDER, 0, padding]
        assert [v.yes for v in votes] == [True, False, True, SUPPLIED]


def test_a_small_rank_beside_a_large_one_replays_where_all_pad_to_the_largest() -> None:
    """Host 0.5.16 runs the largest rank's bucket on all: judged on each rank's own tokens, 1 beside 100 ran eagerly."""
    rows = together(RANKS, [schedule_batch(1), schedule_batch(100), None, None])
    assert {bool(getattr(row, BALLOT)) for row in rows} == {SUPPLIED}
    rows = together(RANKS, [schedule_batch(1), schedule_batch(3), None, None])
    assert {bool(getattr(row, BALLOT)) for row in rows} == {False}
    verdict = RANKS[0].seen.verdicts[-1]
    assert (verdict.replay, verdict.against) == (False, reasons.PADDING)


def test_later_readers_of_the_rows_see_the_host_s_own_values() -> None:
    """What we put above the prefill flag is taken out again once read."""
    column = probe_columns(SEAMS)["prefill"]
    for row in together(RANKS, [schedule_batch(20), schedule_batch(500), None, None]):
        gathered = getattr(row, SEAMS.field("vote.rows"))
        assert gathered[:, column].tolist() == [1, 1, 0, 0]


def test_the_vote_travels_in_columns_the_host_gathers_anyway() -> None:
    """No wider row: three different columns of the host's own, found by marked values."""
    columns = probe_columns(SEAMS)
    assert len(set(columns.values())) == 3
    assert max(columns.values()) < make_row(2, 1, True, True)._get_local_tensor("cpu").numel()


def test_a_decode_vote_is_not_touched() -> None:
    """The decode graph's column leaves as the host filled it."""
    import dataclasses

    name = next(
        f.name for f in dataclasses.fields(dp_attn.MLPSyncBatchInfo)
        if f.name in ("can_cuda_graph", "can_run_decode_cuda_graph")
    )  # fmt: skip
    for wanted in (True, False):
        rows = together(RANKS[:2], [schedule_batch(500)] * 2, **{name: wanted})
        assert [bool(getattr(row, name)) for row in rows] == [wanted] * 2


def test_a_split_is_stopped_before_the_collective() -> None:
    """The group agreed, this rank may not: stop naming rank, reasons, bucket and votes; never return."""
    together(RANKS, [schedule_batch(20), schedule_batch(50), None, None])
    with pytest.raises(LockstepError) as caught:
        RANKS[1].decide(forward_batch(64, [64] * 4, True, replace_embeds=torch.zeros(1)))
    text = str(caught.value)
    step = RANKS[1].progress.step
    for part in ("DP rank 1, which voted yes (no reasons), may not now: replace_embeds", f"step {step}, bucket 64",
                 "rank 0 yes, 20 tokens", "rank 1 yes, 50 tokens"):  # fmt: skip
        assert part in text


def test_a_rank_that_would_replay_another_bucket_is_stopped() -> None:
    """S#37561: 8 against 256 hung for 600 s. Where all run one length, another bucket is stopped, with both and the votes."""
    together(RANKS, [schedule_batch(20), schedule_batch(50), None, None])
    padded = {"dp_padding_mode": DpPaddingMode.MAX_LEN}
    assert RANKS[0].decide(forward_batch(64, [64] * 4, True, **padded)) is True
    with pytest.raises(LockstepError) as caught:
        RANKS[1].decide(forward_batch(100, [64] * 4, True, **padded))
    text = str(caught.value)
    for part in ("DP rank 1", "bucket 64", "would replay bucket 128 for the 100 tokens", "rank 1 yes, 50 tokens"):
        assert part in text
    # Ranks that may run their own lengths, or know only their own count, choose their own buckets.
    assert RANKS[1].decide(forward_batch(100, [20, 100, 0, 0], True, dp_padding_mode=DpPaddingMode.SUM_LEN)) is not None
    assert RANKS[1].decide(forward_batch(100, [100], True, **padded)) is True


def test_the_other_direction_is_no_split() -> None:
    """The group decided against, this rank could have: it runs eagerly with the others."""
    together(RANKS, [schedule_batch(20), schedule_batch(500), None, None])
    assert RANKS[0].decide(forward_batch(20, [20, 500, 0, 0], False)) is False
    forward = RANKS[0].seen.forwards[-1]
    assert forward.against == reasons.ABOVE_LADDER
    assert (forward.replay, forward.tokens) == (False, 20)


def test_a_refusal_of_the_host_that_we_do_not_know_is_voted_and_named() -> None:
    """The host's own no counts; its reason is called what it is: the host's."""
    if "runner.local" not in SEAMS:
        assert Rank(0).feature._host_has_predicate is False
    together(RANKS, [schedule_batch(20)] * 4, host_yes=False)
    assert {v.against for v in RANKS[0].seen.verdicts[-1].votes} == {reasons.HOST}


def test_without_a_group_the_local_check_decides_alone() -> None:
    """TP only: no vote, the same predicate, every reason reported."""
    rank = Rank(0)
    assert rank.decide(forward_batch(20, None, False)) is True
    assert rank.decide(forward_batch(500, None, False, input_embeds=torch.zeros(1))) is False
    assert rank.seen.forwards[-1].against == reasons.INPUT_EMBEDS | reasons.ABOVE_LADDER


def test_a_draft_model_s_runner_is_passed_over() -> None:
    """A draft runner's answer is the host's, and no forward of it is counted."""
    rank = Rank(0)
    runner = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=True), prefill_backend_name="breakable")
    assert rank.feature.on_decide(lambda r, fb: True, runner, None) is True
    assert rank.seen.forwards == []


class Veto:
    def __init__(self, reason: str | None) -> None:
        self.reason = reason
        self.asked = 0

    @hookimpl
    def bcg_reasons(self) -> list[str]:
        return ["too_hot"]

    @hookimpl
    def bcg_replay_veto(self, batch: Any) -> str | None:
        self.asked += 1
        return self.reason


def test_a_plugin_s_veto_travels_in_the_vote() -> None:
    """One rank's plugin refuses with its own reason; every rank's verdict has it, and who said so."""
    table = ReasonTable([("theirs", "too_hot")])
    vetoes = [Veto("too_hot" if rank == 2 else None) for rank in range(4)]
    ranks = [Rank(r, ("theirs", vetoes[r]), table=table) for r in range(4)]
    together(ranks, [schedule_batch(20)] * 4)
    for rank in ranks:
        verdict = rank.seen.verdicts[-1]
        assert not verdict.replay
        assert [table.decode(v.against) for v in verdict.votes] == [(), (), ("too_hot",), ()]
    assert [v.asked for v in vetoes] == [1] * 4
    ranks[2].decide(forward_batch(20, [20] * 4, False))
    assert vetoes[2].asked == 1, "a veto is asked once, before the gather, not again at forward time"


def test_vetoes_are_not_asked_where_ranks_do_not_vote(caplog: pytest.LogCaptureFixture) -> None:
    """TP ranks without DP attention: a veto on one of them would hang the others; it is warned about once."""
    table = ReasonTable([("theirs", "too_hot")])
    veto = Veto("too_hot")
    rank = Rank(0, ("theirs", veto), table=table, tp=2)
    for _ in range(3):
        assert rank.decide(forward_batch(20, None, False)) is True
    assert veto.asked == 0
    assert caplog.text.count("vetoes are not asked") == 1
    alone = Rank(0, ("theirs", veto), table=table, tp=1)
    assert alone.decide(forward_batch(20, None, False)) is False
    assert alone.seen.forwards[-1].against == table.bit("too_hot")


# ---------------------------------------------------------------------- healthy servers are not stopped


def test_an_idle_rank_of_a_group_that_gathers_no_counts_runs_eagerly() -> None:
    """0.5.16 with --moe-dense-tp-size 1: each rank knows its own count only, and an idle one runs 0 tokens."""
    together(RANKS, [schedule_batch(20), None, None, None])
    assert RANKS[0].decide(forward_batch(32, [32], True)) is True
    assert RANKS[1].decide(forward_batch(0, [0], True)) is False


def test_a_rank_without_tokens_is_no_contradiction() -> None:
    """All ranks read it off the same list of counts, and all run eagerly."""
    together(RANKS, [schedule_batch(20), None, schedule_batch(20), None])
    for rank in RANKS[::2]:
        assert rank.decide(forward_batch(20, [20, 0, 20, 0], True)) is False
        assert rank.seen.forwards[-1].against == reasons.INACTIVE_RANK


def test_counts_without_a_vote_are_no_group() -> None:
    """One attention-DP rank whose host sets counts all the same: the local check decides, nothing stops."""
    rank = Rank(0)
    assert rank.decide(forward_batch(20, [20], True), host=False) is ("runner.local" not in SEAMS)
    assert rank.decide(forward_batch(500, [500], True)) is False
    assert rank.decide(forward_batch(20, [20], False)) is False, "the host's own refusal is obeyed"


def test_a_forward_without_host_side_lengths_is_left_to_the_host() -> None:
    """A context limit and no seq_lens_cpu: the host reads the device, its answer counts."""
    rank = Rank(0)
    rank.feature.runner = FACTS._replace(max_context=100)
    assert rank.decide(forward_batch(20, None, False, seq_lens_cpu=None)) is True


def test_a_hidden_mode_set_after_the_vote_is_voted_from_then_on() -> None:
    """Speculation sets it in the worker, the same everywhere: eager once, then part of the vote; never a stop."""
    ranks = [Rank(r) for r in range(2)]
    for rank in ranks:
        rank.feature.runner = FACTS._replace(hidden_mode_scheduled=False)
    step: list[ScheduleBatch | None] = [schedule_batch(20), schedule_batch(20)]
    together(ranks, step)
    assert [r.decide(forward_batch(20, [20, 20], True, capture_hidden_mode=CaptureHiddenMode.FULL)) for r in ranks] == [
        False, False,
    ]  # fmt: skip
    together(ranks, step)
    assert {r.seen.verdicts[-1].against for r in ranks} == {reasons.HIDDEN_MODE}


def test_speculation_leaves_the_hidden_mode_out_of_the_first_vote() -> None:
    """S#25568: a target captured at FULL whose scheduler knows only NULL must not be vetoed for ever."""
    ranks = [Rank(r) for r in range(2)]
    for rank in ranks:
        rank.feature.runner = FACTS._replace(hidden_mode=2, hidden_mode_scheduled=False)
    together(ranks, [schedule_batch(20), schedule_batch(20)])
    assert ranks[0].seen.verdicts[-1].replay


def test_another_backend_s_graphs_are_left_to_the_host() -> None:
    """``--cuda-graph-backend-prefill full``: the host votes for its own graphs, and we do not turn them off."""
    ranks = [Rank(r) for r in range(2)]
    full = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=False), prefill_backend_name="full")
    for rank in ranks:
        rank.feature.runner = None
        rank.feature.on_runner(None, full, full.model_runner)
    together(ranks, [schedule_batch(500), schedule_batch(20)])
    assert ranks[0].seen.verdicts[-1].replay
    together(ranks, [schedule_batch(20), schedule_batch(20)], host_yes=False)
    assert ranks[0].seen.verdicts[-1].against == reasons.HOST


def test_a_convertible_decode_batch_has_a_context_too() -> None:
    """The host turns it into a prefill of one token a request if all agree; a context limit must not forbid that."""
    ranks = [Rank(r) for r in range(2)]
    for rank in ranks:
        rank.feature.runner = RunnerFacts((1, 16), max_context=100)
    decode = schedule_batch(0, ForwardMode.DECODE, seq_lens_cpu=torch.tensor([50]))
    together(ranks, [decode, schedule_batch(16, seq_lens_cpu=torch.tensor([16]))])
    assert ranks[0].seen.verdicts[-1].replay


def test_verification_batches_are_not_counted_as_prefills() -> None:
    """Speculative verification is extend-shaped, but no prefill: it must not lower the coverage."""
    rank = Rank(0)
    rank.decide(forward_batch(20, None, False, forward_mode=ForwardMode.TARGET_VERIFY))
    assert rank.seen.forwards == []


def test_a_vote_over_the_wrong_group_is_an_error() -> None:
    """dp > 1 and a group of fewer: the verdict would be each rank's own opinion (Infera#34)."""
    ranks = [Rank(r, world=8) for r in range(2)]
    with pytest.raises(LockstepError, match="2 participants, but there are 8 DP ranks"):
        together(ranks, [schedule_batch(20), schedule_batch(20)])


PAIRS = tuple(rank // 2 for rank in range(16))
"""The DP rank of each of 16 ranks, two to a DP rank."""


@pytest.mark.parametrize(
    ("members", "dp_of", "words"),
    [
        ([3], (), "rank 3, 1 participants, but there are 8 DP ranks: DP rank 1, 2, 3, 4, 5, 6, 7 would"),
        (list(range(8)), PAIRS, "8 participants, but there are 8 DP ranks: DP rank 4, 5, 6, 7 would"),
        (list(range(0, 16, 2)), PAIRS, None),
        (list(range(8)), (), None),
    ],
)
def test_a_group_that_does_not_hold_all_dp_ranks_is_refused_before_the_gather(
    monkeypatch: pytest.MonkeyPatch, members: list[int], dp_of: tuple[int, ...], words: str | None
) -> None:
    """Infera#34: an attention-TP group of one when dp = tp; also one of the right size with the wrong members."""
    monkeypatch.setattr(torch.distributed, "get_process_group_ranks", lambda group: members)
    rank = Rank(0, world=8)
    rank.progress.dp_ranks = dp_of
    gathered: list[Any] = []
    if words is None:
        rank.feature._check_group("cpu", object())
        return
    with pytest.raises(LockstepError, match=words):
        rank.feature.on_gather(lambda info, *a, **k: gathered.append(info), make_row(8, 20, True, True), "cpu", object())
    assert not gathered


def test_an_idle_rank_s_plugin_is_not_asked() -> None:
    """There is no batch to refuse."""
    veto = Veto("too_hot")
    rank = Rank(0, ("theirs", veto), table=ReasonTable([("theirs", "too_hot")]))
    together([rank, RANKS[1]], [None, schedule_batch(20)])
    assert veto.asked == 0
    assert rank.seen.verdicts[-1].replay


def test_an_undeclared_reason_stops_with_its_name() -> None:
    """A bit that other ranks do not know cannot be voted."""
    rank = Rank(0, ("theirs", Veto("too_hot")))
    _local.group, _local.rank = Group(1), 0
    with pytest.raises(VetoError, match="'too_hot'"):
        rank.vote(schedule_batch(20), 1)


def test_a_vote_that_did_not_reach_all_ranks_is_noticed() -> None:
    """Rows and the host's reduction disagree: a gather over the wrong group (Infera#34) must not pass."""
    rank = Rank(0)
    info = make_row(2, 20, True, True)

    def half(info: Any, *a: Any, **k: Any) -> None:
        row = info._get_local_tensor("cpu")
        refused = row.clone()
        refused[probe_columns(SEAMS)["ballot"]] = 0
        setattr(info, SEAMS.field("vote.rows"), torch.stack([row, refused]))
        info.is_extend_in_batch = True

    rank.feature.step.batch = schedule_batch(20)
    with pytest.raises(LockstepError, match="did not reach all ranks"):
        rank.feature.on_gather(half, info)


def test_vote_and_reasons_cost_little() -> None:
    """P5: at most 30 us over the host's own for one step of 8 ranks (median; best of five)."""
    rank = Rank(0)
    rows = torch.stack([make_row(8, 20, True, True)._get_local_tensor("cpu")] * 8)
    batch, ballot, name = schedule_batch(20), BALLOT, SEAMS.field("vote.rows")

    def gathered(info: Any) -> None:
        setattr(info, name, rows)
        info.is_extend_in_batch = True
        setattr(info, ballot, True)

    info = make_row(8, 20, True, True)
    forward = forward_batch(20, [20] * 8, True)

    def host_only() -> None:
        info.is_extend_in_batch = True
        gathered(info)

    def with_us() -> None:
        info.is_extend_in_batch = True
        rank.feature.on_batch(lambda a, b: rank.feature.on_gather(gathered, info), None, batch)
        rank.decide(forward)

    def median(function: Any) -> float:
        best = 1e9
        for _ in range(5):
            times = []
            for _ in range(400):
                start = time.perf_counter()
                function()
                times.append(time.perf_counter() - start)
            best = min(best, sorted(times)[200])
        return best * 1e6

    extra = median(with_us) - median(host_only)
    print(f"vote, reasons, check and record: {extra:.1f} us a step")
    assert extra < 30.0


# ---------------------------------------------------------------------- against the host's own check

forwards = st.fixed_dictionaries(
    {
        "run": st.integers(1, 140), "prefix": st.integers(0, 3), "logprob": st.booleans(), "embeds": st.booleans(),
        "replaced": st.booleans(), "hidden": st.sampled_from(list(CaptureHiddenMode)), "agreed": st.booleans(),
        "mode": st.sampled_from([ForwardMode.EXTEND, ForwardMode.MIXED, ForwardMode.TARGET_VERIFY]),
        "idle": st.booleans(),
    }
)  # fmt: skip


@settings(deadline=None)
@given(forwards, st.booleans())
def test_our_check_is_the_host_s_but_for_what_we_lift(made: dict[str, Any], dsa: bool) -> None:
    """The host's real ``can_run_graph`` on the same batch: stricter nowhere, laxer only for prefixes and small buckets."""
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    from sglang_bcg_dsa import hostfacts

    if not SUPPLIED:
        # The host has a predicate of its own, which every yes of ours has to pass as well.
        assert Rank(0).feature._host_has_predicate
        return
    counts = [0, made["run"]] if made["idle"] else [made["run"]] * 2
    batch = forward_batch(
        made["run"], counts, made["agreed"], forward_mode=made["mode"], extend_prefix_lens_cpu=[made["prefix"]],
        return_logprob=made["logprob"], input_embeds=torch.zeros(1) if made["embeds"] else None,
        replace_embeds=torch.zeros(1) if made["replaced"] else None, capture_hidden_mode=made["hidden"],
    )  # fmt: skip
    runner = object.__new__(PrefillCudaGraphRunner)
    runner.__dict__ |= {
        "_is_full_backend": False, "prefill_backend_name": "breakable", "has_mha_companion_layers": True,
        "capture_hidden_mode": CaptureHiddenMode.NULL, "capture_num_tokens": list(LADDER), "max_num_tokens": LADDER[-1],
        "require_mlp_tp_gather": True,
        "model_runner": SimpleNamespace(
            is_draft_worker=False, spec_algorithm=SimpleNamespace(is_none=lambda: True),
            attn_backend=SimpleNamespace(replays_any_prefix=dsa),
        ),
    }  # fmt: skip
    rank = Rank(0)
    rank.feature.runner = facts = hostfacts.of_runner(runner, SEAMS)
    ours, host = rank.decide_with(runner, batch), bool(PrefillCudaGraphRunner.can_run_graph(runner, batch))
    lifted = (dsa and made["prefix"] > 0) or RunnerFacts(LADDER).pads_too_much(made["run"])
    assert ours == host or (ours and lifted)
    if ours and not host:
        assert not facts.pads_too_much(made["run"])
