"""``compare``: the real server with the caller's own arguments; what it accepts and what it does not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_bcg_dsa.compare import Alone, Answers, Limits, Options, Outcome, Single, differences, exact, judge
from sglang_bcg_dsa.predicate import RunnerFacts
from sglang_bcg_dsa.testing import dsa_folder, platform, server
from sglang_bcg_dsa.testing.models import write_model
from sglang_bcg_dsa.testing.server import ServerSpec
from tests.test_rehearsal import ALL, HOST_VOTES_ON_FACTS


def outcome(graphs: Answers, eager: Answers, again: Answers, replay: int = 19, outside: int = 3, other: int = 1) -> Outcome:
    state = {"prefill": {"replay": replay, "eager": outside + other}, "reasons": {"above_ladder": outside, "padding": other}}
    found = Outcome("SGLang", 1, (16,), len(eager), [state])
    found.graphs, found.eager = differences(graphs, eager), differences(again, eager)
    judge(found)
    return found


def answers(shift: float, tokens: int = 0) -> Answers:
    """Twenty answers; the first ``tokens`` of them with another second token."""
    return {(i,): ((1, 2 + (i < tokens)), (-1.0 + shift * i, -2.0)) for i in range(20)}


def test_equal_answers_pass() -> None:
    """Graphs equal to a deterministic eager server are accepted, with the coverage of what fits the ladder."""
    found = outcome(answers(0), answers(0), answers(0))
    assert found.problems == []
    assert found.coverage == 0.95


def test_a_difference_that_eager_does_not_show_is_a_problem() -> None:
    """Invariant: graphs may differ only as far as eager differs from itself."""
    assert "log-probabilities" in outcome(answers(0.01), answers(0), answers(0)).problems[0]
    assert outcome(answers(0.01), answers(0), answers(0.008)).problems == []
    assert outcome(answers(0.01), answers(0), answers(0.001)).problems
    assert "other tokens" in outcome(answers(0, tokens=1), answers(0), answers(0)).problems[0]
    assert outcome(answers(0, tokens=2), answers(0), answers(0, tokens=2)).problems == []


def test_an_answer_of_another_rank_is_found() -> None:
    """A host drops what it does not know of a request; rows would then be counted on the wrong rank."""
    server._check_rank([{"meta_info": {"dp_rank": 1}}], 1)
    server._check_rank([{"meta_info": {}}], None)
    for said in ({"dp_rank": 0}, {}):
        with pytest.raises(RuntimeError, match="requests for DP rank 1 were answered by"):
            server._check_rank([{"meta_info": {"dp_rank": 1}}, {"meta_info": said}], 1)


def test_little_coverage_is_a_problem() -> None:
    """Invariant: answers that no graph gave prove nothing."""
    assert "coverage" in outcome(answers(0), answers(0), answers(0), replay=10).problems[0]
    assert "coverage" in outcome(answers(0), answers(0), answers(0), replay=0, other=0).problems[0]


def test_not_a_number_is_no_equality() -> None:
    """A NaN on one side, or on both, is a difference."""
    nan: Answers = {(1,): ((1,), (float("nan"),))}
    assert differences(nan, nan).largest == float("inf")


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(-5, 0)), min_size=1, max_size=4))
def test_tokens_after_the_first_other_one_are_not_compared(pairs: list[tuple[int, float]]) -> None:
    """Once a token differs, the next ones answer another prompt."""
    one: Answers = {(0,): (tuple(t for t, _ in pairs), tuple(p for _, p in pairs))}
    other: Answers = {(0,): ((9, *one[0,][0][1:]), (one[0,][1][0], *(p - 1 for p in one[0,][1][1:])))}
    found = differences(one, other)
    assert (found.tokens, found.largest) == (1, 0.0)


@given(st.integers(1, 600), st.sampled_from([64, 128, 192, 256]), st.sampled_from([1, 64]), st.sampled_from([0, 64, 256]))
def test_company_fills_the_bucket(extend: int, chunk: int, page: int, free: int) -> None:
    """Invariant: an eager batch in company has the row count that the request ran with, in one batch; where its bucket
    would be mostly padding it ran eagerly, with its own."""
    ladder = (16, 64, 128)
    last = (extend - 1) % chunk + 1
    bucket = next((b for b in ladder if last <= b <= max(free, 2 * last)), last)
    made = Limits(RunnerFacts(ladder, padding_free=free), chunk, page).company(extend)
    if made is None:
        pages = -(-last // page) + -(-(bucket - last) // page)
        assert pages * page > chunk or (extend > chunk and chunk not in ladder)
    else:
        assert last + made == bucket <= max(chunk, last)


def single(prompt: tuple[int, ...], shift: float = 0.0) -> Single:
    return Single(len(prompt), -1.0 + shift, 0)


def test_requests_sent_alone_have_to_be_equal_bit_for_bit() -> None:
    """Invariant: with the same rows graphs give what eager gives; only what eager itself does not repeat is left out."""
    prompts = [(1,) * n for n in range(1, 11)]
    eager = {p: single(p) for p in prompts}
    filled: dict[tuple[int, ...], int | None] = dict.fromkeys(prompts, 0)
    assert exact(eager, eager, eager, filled) == Alone(10, 10, [])
    off = {**eager, prompts[3]: single(prompts[3], 1e-7)}
    found = exact(off, eager, eager, filled)
    assert (found.comparable, found.equal) == (10, 9)
    assert "4 tokens" in found.unequal[0]
    assert exact(off, eager, eager, {**filled, prompts[3]: None}) == Alone(9, 9, [])
    assert exact(off, eager, off, filled) == Alone(9, 9, [])
    cached = {**eager, prompts[3]: eager[prompts[3]]._replace(cached=2)}
    assert exact(eager, cached, cached, filled) == Alone(9, 9, []), "with another cache other rows are computed"


def test_what_was_read_from_the_cache_has_to_be_comparable_too() -> None:
    """A prefix that was computed with other rows is another prefix: who reads it is left out; others are not."""
    first, second, other = (7,) * 9, (7,) * 6 + (8,), (5,) * 6 + (8,)
    eager = {p: single(p)._replace(cached=0 if p is first else 6) for p in (first, second, other)}
    filled: dict[tuple[int, ...], int | None] = {first: None, second: 0, other: 0}
    assert exact(eager, eager, eager, filled) == Alone(1, 1, [])
    assert exact(eager, eager, eager, dict.fromkeys(filled, 0)) == Alone(3, 3, [])


def test_an_unequal_request_and_too_few_comparable_ones_are_problems() -> None:
    """Invariant: one bit is enough, and a comparison of few requests is none."""
    found = outcome(answers(0), answers(0), answers(0))
    for alone, word in ((Alone(20, 19, ["4 tokens"]), "4 tokens"), (Alone(9, 9, []), "only 9 of 20"), (Alone(10, 10, []), "")):
        found.alone = alone
        judge(found)
        assert [word in p for p in found.problems] == ([True] if word else [])


@pytest.mark.parametrize("requests", [0, -1, 100_001])
def test_bad_counts_are_refused(requests: int) -> None:
    """Bad input gets one clear error."""
    with pytest.raises(ValueError, match="--requests"):
        Options(requests)


def compare(tmp_path: Path, model: Path, preload: dict[str, str]) -> tuple[int, dict[str, Any]]:
    """The command, end to end, with the CPU platform chosen by the caller's environment: status and report."""
    kernels = tmp_path / "kernels"
    dsa_folder.write_distribution(kernels)
    spec = ServerSpec(
        model, chunked_prefill_size=256, ladder=(16, 32, 64, 128), extra_args=dsa_folder.SERVER_ARGS, python_path=(kernels,),
        env={"TORCHDYNAMO_DISABLE": "1", **dsa_folder.SERVER_ENV},
    )  # fmt: skip
    metadata = tmp_path / "platform"
    platform.write_distribution(metadata)
    args = spec.command(0)[3:]
    # `compare` gives the first three itself; the model decides about its attention.
    for flag, values in (("--host", 1), ("--port", 1), ("--skip-server-warmup", 0), ("--attention-backend", 1)):
        at = args.index(flag)
        del args[at : at + 1 + values]
    done = subprocess.run(
        [sys.executable, "-m", "sglang_bcg_dsa.cli", "compare", "--json", "--requests", "24", "--keep", str(tmp_path / "k"),
         "--", *args],
        env=spec.environment(metadata, {**os.environ, **preload}), capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.stdout, done.stderr
    return done.returncode, json.loads(done.stdout)


# Two servers take a minute; what compares them is this package's, the same on both hosts of the suite.
if ALL or not HOST_VOTES_ON_FACTS:

    def test_a_real_server_of_the_caller_s_arguments(tmp_path: Path, preload: dict[str, str]) -> None:
        """SGLang's DSA model on one rank, prefixes and chunks: graphs and eager are equal on the CPU."""
        status, report = compare(tmp_path, write_model(tmp_path / "model", "dsa"), preload)
        assert (status, report["problems"]) == (0, [])
        assert (report["ranks"], report["coverage"]) == (1, 1.0)
        assert report["ladder"] == [16, 32, 64, 128]
        assert report["alone"]["comparable"] == report["alone"]["equal"] >= 20
        assert report["graphs"] == report["eager"] == {"tokens": 0, "median": 0.0, "p90": 0.0, "largest": 0.0}

    def test_a_server_that_does_not_come_up_is_a_problem_with_its_log(tmp_path: Path) -> None:
        """Invariant: what ends a server is in the report, and says where more is; nothing is compared."""
        status, report = compare(tmp_path, tmp_path / "nothing", {})
        assert status == 1
        assert "a server failed (--keep DIR keeps its whole log)" in report["problems"][0]
        assert report["graphs"] is None
        assert (tmp_path / "k/graphs.log").stat().st_size
