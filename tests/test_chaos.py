"""What can happen to a rank, at random: votes and audit over real processes here; a real server by the command.

One process that has imported the host forks three ranks a round. ``sglang-bcg-dsa rehearse --chaos MINUTES`` runs the
same kinds of faults against the rehearsal's server, and ``--layers`` as many of these rounds as asked for.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from sglang_bcg_dsa import chaos, cli
from sglang_bcg_dsa.testing import layers
from tests.conftest import Zygote

CODE = """
import json, signal
signal.alarm(240)
from sglang_bcg_dsa.seams import examine
from sglang_bcg_dsa.testing import layers
found = layers.run(3, 100, 0.15, lambda text: None)
root = layers.one_round(3, layers.Round(0, "stall", 0, 2, 0.1, 5), examine())
layers.STALL_SECONDS, layers.END_SECONDS = 600.0, 2.0
blind = [layers.one_round(3, layers.Round(0, kind, 1, 2, 0.1, 5), examine()) for kind in ("stop", "hang")]
print(json.dumps({"found": found, "root": root, "blind": blind}))
"""


@pytest.fixture(scope="module")
def seen(zygote: Zygote) -> dict[str, Any]:
    """All rounds, in one process."""
    done = zygote(code=CODE)
    assert done.returncode == 0, done.stderr[-4000:]
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def test_whatever_happens_to_a_rank_is_noticed_and_named_in_time(seen: dict[str, Any]) -> None:
    """Killed, stopped, paused, slow, disagreeing, stalled, spinning, hanging: an end with the right name, or no end at all."""
    found = seen["found"]
    assert found["problems"] == []
    assert found["kinds"].keys() == layers.KINDS.keys()
    assert found["answers_compared"] > 0
    assert found["slowest_end_seconds"] < layers.END_SECONDS


def test_a_rank_that_others_wait_for_before_they_vote_is_named(seen: dict[str, Any]) -> None:
    """All ranks but the first get their requests from it: when it stalls they are in that broadcast, in no vote."""
    assert seen["root"]["problems"] == []
    assert seen["root"]["ended_after_seconds"] is not None


def test_without_a_watchdog_the_same_rounds_are_problems(seen: dict[str, Any]) -> None:
    """The rounds can fail: with a limit of ten minutes, a stopped and a hanging rank leave the group waiting."""
    for done in seen["blind"]:
        assert "still up" in done["problems"][0]


def test_a_server_s_rounds_are_seeded_and_bring_every_kind() -> None:
    """Each block of rounds has every kind once; a seed gives the same rounds."""
    one, other = chaos.plans(3, 4), chaos.plans(3, 4)
    made = [one() for _ in range(2 * len(chaos.KINDS))]
    assert made == [other() for _ in made]
    assert set(Counter(plan.kind for plan in made).values()) == {2}
    assert {plan.rank for plan in made} <= set(range(4))


@pytest.mark.parametrize(
    "args", [("--chaos", "0"), ("--chaos", "2000"), ("--chaos", "1", "--fault", "die"), ("--chaos", "1", "--host-only")]
)
def test_bad_input_starts_nothing(args: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2 and one line."""
    assert cli.main(["rehearse", *args]) == 2
    assert "expected minutes up to 1440" in capsys.readouterr().err
