"""The predicate, the votes and the verdict: ranks agree by construction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bcg_dsa import reasons, vote
from sglang_bcg_dsa.predicate import BatchFacts, RunnerFacts, reasons_against
from sglang_bcg_dsa.reasons import MAX_REASONS, NAMES, ReasonTable

LADDER = (16, 32, 64, 128)
RUNNER = RunnerFacts(LADDER)
masks = st.integers(1, (1 << MAX_REASONS) - 1)


@st.composite
def facts(draw: st.DrawFn) -> BatchFacts:
    flag = st.booleans()
    return BatchFacts(
        batch_size=draw(st.integers(1, 64)), num_tokens=draw(st.integers(1, 300)), prefill=draw(flag),
        input_embeds=draw(flag), replace_embeds=draw(flag), has_prefix=draw(flag), is_target_verify=draw(flag),
        hidden_mode=draw(st.none() | st.integers(0, 2)), return_logprob=draw(flag), lora=draw(flag),
        is_mixed=draw(flag), multimodal=draw(flag), context_length=draw(st.none() | st.integers(1, 400)),
        inactive_rank=draw(flag),
    )  # fmt: skip


@st.composite
def runners(draw: st.DrawFn) -> RunnerFacts:
    flag = st.booleans()
    return RunnerFacts(
        LADDER, draw(st.integers(0, 2)), draw(flag), draw(flag), draw(flag), draw(flag), draw(flag), draw(flag), draw(flag),
        draw(st.none() | st.integers(1, 400)), draw(st.none() | st.integers(1, 64)), draw(st.integers(1, 4)),
    )  # fmt: skip


# One fact at a time: (fact changed, runner that minds it, reason)
SINGLE = [
    (dict(prefill=False), {}, reasons.NOT_PREFILL),
    (dict(input_embeds=True), {}, reasons.INPUT_EMBEDS),
    (dict(replace_embeds=True), {}, reasons.REPLACE_EMBEDS),
    (dict(has_prefix=True), dict(prefix=False), reasons.PREFIX),
    (dict(is_target_verify=True), {}, reasons.TARGET_VERIFY),
    (dict(hidden_mode=2), {}, reasons.HIDDEN_MODE),
    (dict(hidden_mode=0), dict(hidden_mode=2), reasons.HIDDEN_MODE),
    (dict(return_logprob=True), dict(logprob=False), reasons.LOGPROB),
    (dict(lora=True), dict(lora=False), reasons.LORA),
    (dict(is_mixed=True), dict(mixed=False), reasons.MIXED),
    (dict(multimodal=True), dict(multimodal=False), reasons.MULTIMODAL),
    (dict(context_length=101), dict(max_context=100), reasons.CONTEXT_LENGTH),
    (dict(context_length=None), dict(max_context=100), reasons.CONTEXT_LENGTH),
    (dict(batch_size=9), dict(max_batch_size=8), reasons.BATCH_SIZE),
    (dict(num_tokens=129), {}, reasons.ABOVE_LADDER),
    (dict(num_tokens=7), {}, reasons.PADDING),
    (dict(inactive_rank=True), {}, reasons.INACTIVE_RANK),
]


@pytest.mark.parametrize(("changed", "runner", "reason"), SINGLE)
def test_each_fact_has_its_own_reason(changed: dict[str, object], runner: dict[str, object], reason: int) -> None:
    """One fact against gives exactly its reason, and without it there is none."""
    sound = BatchFacts(batch_size=1, num_tokens=50, context_length=50)
    against = RunnerFacts(LADDER)._replace(**runner)
    if runner.get("hidden_mode") != 2:
        assert reasons_against(sound, against) == 0
    assert reasons_against(sound._replace(**changed), against) == reason


def test_without_graphs_the_reason_says_so() -> None:
    """A rank whose graphs were not captured refuses, whatever the batch."""
    assert reasons_against(BatchFacts(1, 16), None) == reasons.NO_GRAPH_RUNNER


def test_all_reasons_are_returned_not_the_first() -> None:
    """An operator who removes one reason must not meet the next one only afterwards."""
    batch = BatchFacts(1, 500, input_embeds=True, is_target_verify=True)
    assert reasons_against(batch, RUNNER) == reasons.INPUT_EMBEDS | reasons.TARGET_VERIFY | reasons.ABOVE_LADDER


@pytest.mark.parametrize(
    ("tokens", "ladder", "reason"),
    [
        (3208, (2816, 3072, 8192), reasons.PADDING),  # S#31487: 2.55 times the work
        (2700, (2816, 3072, 8192), 0),
        (5, (4, 16), reasons.PADDING),  # S#40253: refused, though cheap
        (4, (4, 16), 0),
        (8, (16,), 0),  # exactly double is still accepted
        (16, (16,), 0),
        (17, (16,), reasons.ABOVE_LADDER),
    ],
)
def test_padding_at_its_edges(tokens: int, ladder: tuple[int, ...], reason: int) -> None:
    """A bucket may double the tokens, not more; the cases are those reported from the field."""
    assert reasons_against(BatchFacts(1, tokens), RunnerFacts(ladder)) == reason


def test_capture_of_the_maximum_serves_lesser_hidden_modes() -> None:
    """A host that captures FULL for all serves NULL from it; one that compares for equality does not."""
    batch = BatchFacts(1, 16, hidden_mode=0)
    assert reasons_against(batch, RunnerFacts(LADDER, hidden_mode=2, hidden_mode_exact=False)) == 0
    assert reasons_against(batch, RunnerFacts(LADDER, hidden_mode=2)) == reasons.HIDDEN_MODE


def test_an_unknown_hidden_mode_is_no_reason() -> None:
    """At schedule time speculation has not decided it; None must not veto (S#25568 vetoed always)."""
    assert reasons_against(BatchFacts(1, 16, hidden_mode=None), RunnerFacts(LADDER, hidden_mode=2)) == 0


@given(facts(), runners())
def test_what_is_unknown_at_schedule_time_can_only_add_a_refusal_later(batch: BatchFacts, runner: RunnerFacts) -> None:
    """Vote and forward-time check agree but for the two facts that only the forward knows."""
    voted = reasons_against(batch._replace(hidden_mode=None, inactive_rank=False), runner)
    checked = reasons_against(batch, runner)
    assert voted & ~checked == 0
    assert (checked & ~voted) & ~(reasons.HIDDEN_MODE | reasons.INACTIVE_RANK) == 0


# ---------------------------------------------------------------------- rows


@given(st.booleans(), masks)
def test_reasons_survive_the_column(yes: bool, mask: int) -> None:
    """A vote comes back with the reasons it went out with, in an int64."""
    against = 0 if yes else mask
    column = vote.encode(True, against)
    assert column < 1 << 63
    assert vote.decode(3, 7, column, yes) == vote.Vote(3, 7, True, yes, against)


@given(st.lists(st.tuples(st.booleans(), masks), min_size=1, max_size=16))
def test_the_host_still_reads_its_own_column(rows: list[tuple[bool, int]]) -> None:
    """The host asks ``max(column) != 0``: the same with reasons in it as without."""
    columns = [vote.encode(prefill, mask) for prefill, mask in rows]
    assert bool(max(columns)) == any(prefill for prefill, _ in rows)


def test_a_rank_that_wrote_no_reason_is_still_explained() -> None:
    """A refusal of a rank that prefills is the host's; of one that does not, its not prefilling."""
    assert vote.decode(0, 5, 1, False).against == reasons.HOST
    assert vote.decode(0, 5, 0, False).against == reasons.NOT_PREFILL


@st.composite
def votes(draw: st.DrawFn) -> list[vote.Vote]:
    count = draw(st.integers(1, 64))
    made = []
    for rank in range(count):
        prefill, yes = draw(st.booleans()), draw(st.booleans())
        against = 0 if yes else draw(masks) if prefill else reasons.NOT_PREFILL
        made.append(vote.Vote(rank, draw(st.integers(0, 200)) if prefill else 0, prefill, yes, against))
    return made


@given(votes(), st.randoms(use_true_random=False))
def test_every_rank_reaches_the_same_verdict(gathered: list[vote.Vote], random_source: object) -> None:
    """Gathered rows are the same on all ranks; so is what each makes of them, whatever its own vote."""
    verdicts = {vote.tally(1, gathered, RUNNER) for _ in gathered}
    assert len(verdicts) == 1
    verdict = verdicts.pop()
    assert verdict.replay == all(v.yes for v in gathered)
    assert (verdict.against == 0) == verdict.replay
    assert [v.rank for v in verdict.noes()] == [v.rank for v in gathered if not v.yes]


def test_ranks_of_different_sizes_share_one_bucket() -> None:
    """7 and 100 tokens replay the bucket of 100 on both ranks (S#37561: 8 against 256 hung)."""
    gathered = [vote.Vote(0, 7, True, True, 0), vote.Vote(1, 100, True, True, 0)]
    assert vote.tally(1, gathered, RUNNER).bucket == 128


def test_an_idle_rank_does_not_veto_and_does_not_decide() -> None:
    """Field report 5.1: [15, 0, 0, 0]: the group replays bucket 16; nobody prefills: nothing is decided."""
    idle = [vote.Vote(rank, 0, False, True, 0) for rank in range(4)]
    assert vote.tally(1, [vote.Vote(0, 15, True, True, 0), *idle[1:]], RUNNER)[1:4] == (True, True, 16)
    assert vote.tally(1, idle, RUNNER)[1:4] == (True, False, None)


def test_two_ranks_two_reasons() -> None:
    """Field report 5.5: rank 2 denies for its hidden mode, rank 5 for padding; the line names both."""
    gathered = [vote.Vote(rank, 16, True, True, 0) for rank in range(8)]
    gathered[2] = vote.Vote(2, 16, True, False, reasons.HIDDEN_MODE)
    gathered[5] = vote.Vote(5, 5, True, False, reasons.PADDING)
    verdict = vote.tally(9, gathered, RUNNER)
    line = vote.describe(verdict, ReasonTable())
    assert not verdict.replay
    assert "rank 2 no (hidden_mode), 16 tokens" in line
    assert "rank 5 no (padding), 5 tokens" in line


@given(votes(), st.integers(0, 64), st.integers(1, 3))
def test_padding_is_the_group_s_where_all_pad_to_the_largest(gathered: list[vote.Vote], free: int, factor: int) -> None:
    """A 1-token rank beside a 100-token one costs nothing more; two small ranks in a large bucket do."""
    runner = RunnerFacts(LADDER, padding_factor=factor, padding_free=free, pads_to_group=True)
    verdict, alone = vote.tally(1, gathered, runner), vote.tally(1, gathered, RunnerFacts(LADDER))
    most = max(v.tokens for v in gathered)
    wasteful = alone.bucket is not None and alone.bucket > max(free, most * factor)
    assert verdict.replay == (alone.replay and not wasteful)
    assert verdict.group_against == (reasons.PADDING if wasteful else 0)
    assert (verdict.against == 0) == verdict.replay
    if alone.replay and alone.bucket is not None and most:
        forward = reasons_against(BatchFacts(1, most), runner)
        assert (forward == 0) == verdict.replay, "the forward-time check of the group's bucket says the same"


def test_small_buckets_are_never_too_much() -> None:
    """S#40253: 5 tokens on [4, 16] are cheaper replayed than eager; 3208 on [2816, 3072, 8192] are not (S#31487)."""
    assert not RunnerFacts((4, 16), padding_free=256).pads_too_much(5)
    assert RunnerFacts((4, 16)).pads_too_much(5)
    # A rank with nothing to run, where ranks gather no counts, would launch kernels over no rows.
    assert RunnerFacts((4, 16), padding_free=256).pads_too_much(0)
    large = RunnerFacts((2816, 3072, 8192), padding_free=256)
    assert large.pads_too_much(3208)
    assert not large.pads_too_much(2700)
    assert not large.pads_too_much(9000), "above the ladder is another reason"


def test_alignment_decides_the_bucket_as_the_host_pads() -> None:
    """Attention TP 4 pads 30 tokens to 32 before a bucket is chosen; 33 to 36."""
    assert vote.tally(1, [vote.Vote(0, 33, True, True, 0)], RunnerFacts((33, 64)), 4).bucket == 64


# ---------------------------------------------------------------------- reasons


def test_bits_of_builtin_reasons_do_not_move() -> None:
    """Logs and exchanged tables of two releases must mean the same."""
    assert [getattr(reasons, name.upper()) for name in NAMES] == [1 << i for i in range(len(NAMES))]
    assert NAMES[:4] == ("not_prefill", "no_graph_runner", "input_embeds", "replace_embeds")


@given(st.sets(st.from_regex(r"[a-z][a-z0-9_]{0,10}", fullmatch=True), max_size=8), st.randoms(use_true_random=False))
def test_plugins_reasons_are_numbered_alike_everywhere(names: set[str], shuffle: object) -> None:
    """The order in which plugins load does not decide a bit."""
    wanted = sorted(names - set(NAMES))
    pairs = [(f"plugin_{n}", n) for n in wanted]
    shuffled = list(pairs)
    shuffle.shuffle(shuffled)  # type: ignore[attr-defined]
    assert ReasonTable(pairs).names == ReasonTable(shuffled).names == (*NAMES, *wanted)


@pytest.mark.parametrize("name", ["Bad", "", "with space", "9lives", "padding", "x" * 33])
def test_a_bad_reason_names_its_plugin(name: str) -> None:
    """A plugin author sees whose reason is wrong, and why."""
    with pytest.raises(SystemExit) as caught:
        ReasonTable([("theirs", name)])
    assert "'theirs'" in str(caught.value)
    assert repr(name) in str(caught.value)


def test_a_reason_belongs_to_one_plugin() -> None:
    """Two plugins with the same reason would be counted as one."""
    with pytest.raises(SystemExit) as caught:
        ReasonTable([("one", "busy"), ("two", "busy")])
    assert "'one' and 'two'" in str(caught.value)


def test_too_many_reasons_do_not_fit_the_vote() -> None:
    """A mask that would not fit an int64 is refused when plugins load."""
    with pytest.raises(SystemExit) as caught:
        ReasonTable([("p", f"r{i}") for i in range(MAX_REASONS)])
    assert f"room for {MAX_REASONS}" in str(caught.value)
