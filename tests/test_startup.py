"""Start-up: ranks compare, hooks are verified, a stalled rank is named, and what is refused says so."""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sglang_bcg_dsa import rollcall, stopping
from sglang_bcg_dsa.config import Config, load
from sglang_bcg_dsa.errors import StartupError
from sglang_bcg_dsa.exchange import Missing, differences, publish_and_collect
from sglang_bcg_dsa.hooks import audit as audit_module
from sglang_bcg_dsa.hooks.audit import AuditFeature
from sglang_bcg_dsa.installer import Installer
from sglang_bcg_dsa.predicate import RunnerFacts
from sglang_bcg_dsa.progress import Progress
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.rollcall import RollCall
from sglang_bcg_dsa.seams import examine, resolve
from tests.conftest import Zygote

SEAMS = examine()


@pytest.fixture
def store() -> dist.HashStore:
    """A real store of torch's, in this process; ranks are threads."""
    return dist.HashStore()


def all_ranks(world: int, function: Any) -> list[Any]:
    """Run ``function(rank)`` in one thread a rank; results or exceptions, in rank order."""
    results: list[Any] = [None] * world

    def one(rank: int) -> None:
        try:
            results[rank] = function(rank)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return results


# ---------------------------------------------------------------------- exchange


def test_every_rank_sees_every_record(store: dist.HashStore) -> None:
    """All ranks end with the same list, in rank order."""
    got = all_ranks(4, lambda rank: publish_and_collect(store, "t", rank, 4, {"rank": rank}, 10))
    assert got == [[{"rank": r} for r in range(4)]] * 4


def test_a_rank_that_says_nothing_is_named(store: dist.HashStore) -> None:
    """Ranks 1 and 3 publish nothing: the others end with their numbers, within the limit."""
    start = time.monotonic()
    got = all_ranks(4, lambda rank: rank in (1, 3) or publish_and_collect(store, "t", rank, 4, {}, 0.5))
    assert time.monotonic() - start < 5
    assert [error.ranks for error in got if isinstance(error, Missing)] == [(1, 3), (1, 3)]


def test_a_difference_names_field_ranks_and_values() -> None:
    """Who has what, per field; equal fields are not mentioned."""
    records = [{"ladder": [16, 32], "v": "1"}, {"ladder": [16, 32], "v": "1"}, {"ladder": [16], "v": "1"}]
    assert differences(records) == ["ladder: rank 0, 1: [16, 32]; rank 2: [16]"]
    assert differences([{"a": 1}, {}]) == ["a: rank 0: 1; rank 1: null"]


@given(st.lists(st.dictionaries(st.sampled_from("abc"), st.integers(0, 2)), min_size=1, max_size=6))
def test_no_difference_means_equal(records: list[dict[str, int]]) -> None:
    """No line exactly when all records are the same."""
    assert (not differences(records)) == all(record == records[0] for record in records)


def audit(
    progress: Progress | None = None, toml: str = "", features: dict[str, Any] | None = None, captured: RunnerFacts | None = None
) -> AuditFeature:
    progress = progress or Progress()
    made = AuditFeature(progress, RollCall(progress), lambda: features or {}, lambda: captured)
    config = load(None)
    if toml:
        import tomllib

        import msgspec

        config = msgspec.convert(tomllib.loads(toml), Config)
    made.bcg_install(
        config=config, seams=SEAMS, reasons=ReasonTable(),
        installer=SimpleNamespace(around=lambda *a: None, after=lambda *a: None),  # type: ignore[arg-type]
    )  # fmt: skip
    made._get_parallel = lambda: SimpleNamespace(pp_size=1, attn_dp_rank=audit_module.group()[1])
    return made


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch, store: dist.HashStore) -> Any:
    """Threads with a rank of their own in a group of ``ranks.world``; the parent is not signalled."""
    here = threading.local()
    state = SimpleNamespace(world=2, here=here, signals=[])
    for module in (audit_module, rollcall):
        monkeypatch.setattr(module, "group", lambda: (store, here.rank, state.world))
    monkeypatch.setattr(stopping, "_tell_parent", lambda: state.signals.append(here.rank))
    return state


@pytest.mark.parametrize(
    ("ladders", "features", "words"),
    [
        ([(16, 32), (16, 32)], [{"vote": "supplied"}] * 2, None),
        ([(16, 32), (16,)], [{}] * 2, ["ladder", "rank 0: [16, 32]", "rank 1: [16]"]),
        ([(16,), (16,)], [{"features": {"moe": "off"}}, {"features": {"moe": "supplied"}}], ["features", "off", "supplied"]),
    ],
)
def test_ranks_that_differ_do_not_start(ranks: Any, ladders: Any, features: Any, words: list[str] | None) -> None:
    """Before the first capture: every rank stops, naming the field and who has what; equal ranks go on."""

    def start(rank: int) -> Any:
        ranks.here.rank = rank
        feature = audit(features=features[rank])
        runner = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=False), capture_num_tokens=list(ladders[rank]))
        return feature.on_capture(lambda r: "captured", runner)

    got = all_ranks(2, start)
    if words is None:
        assert got == ["captured", "captured"]
        return
    for error in got:
        assert isinstance(error, StartupError)
        assert all(word in str(error) for word in words)
    assert sorted(ranks.signals) == [0, 1], "the launching process is told: SGLang does not see a SystemExit"


def test_a_rank_without_the_plugin_is_named_at_start(ranks: Any) -> None:
    """Rank 1 says nothing: rank 0 names it and what to do, after the configured time."""
    ranks.here.rank = 0
    feature = audit(toml="[audit]\nexchange_seconds = 0.3")
    with pytest.raises(StartupError) as caught:
        feature.on_ready(None, None)
    assert "rank 1 did not say what it runs within 0.3 s" in str(caught.value)
    assert "--plugins" in str(caught.value)


def test_ranks_compare_once(ranks: Any, store: dist.HashStore) -> None:
    """Draft models capture too; only the first, target, capture compares."""
    ranks.here.rank, ranks.world = 0, 1
    feature = audit()
    draft = SimpleNamespace(model_runner=SimpleNamespace(is_draft_worker=True), capture_num_tokens=[1])
    feature.on_capture(lambda r: None, draft)
    assert not feature._exchanged
    feature.on_ready(None, None)
    assert feature._exchanged


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ([RunnerFacts((16,)), RunnerFacts((16,))], None),
        ([RunnerFacts((16,)), None], ["graphs captured: rank 0: true; rank 1: false"]),
        ([RunnerFacts((16,)), RunnerFacts((16,), padding_factor=3)], ["graphs, padding_factor: rank 0: 2; rank 1: 3"]),
    ],
)
def test_ranks_whose_graphs_serve_different_batches_do_not_vote(ranks: Any, facts: Any, words: list[str] | None) -> None:
    """Every fact that a verdict follows from is the same everywhere, or the start ends with its name."""

    def start(rank: int) -> Any:
        ranks.here.rank = rank
        feature = audit(captured=facts[rank])
        feature._compare_ready()
        return feature._progress.dp_ranks

    got = all_ranks(2, start)
    if words is None:
        assert got == [(0, 1), (0, 1)]
        return
    for error in got:
        assert isinstance(error, StartupError)
        assert all(word in str(error) for word in words)


def test_everything_that_could_split_ranks_is_compared() -> None:
    """A fact of the graphs that is added later is compared without anybody thinking of it; so are versions."""
    sent: dict[str, Any] = {}
    feature = audit(captured=RunnerFacts((16,)), features={"features": {"vote": "supplied"}})
    feature._compare = lambda prefix, record, own=None: [sent.update(record) or {"dp": 0}]  # type: ignore[method-assign, func-returns-value, list-item]
    feature._get_parallel = lambda: SimpleNamespace(pp_size=1, attn_dp_rank=0)
    feature._compare_start((16,))
    feature._compare_ready()
    assert {f"graphs, {name}" for name in RunnerFacts._fields} <= sent.keys()
    versions = {"plugin version", "SGLang version", "torch version"}
    assert versions | {"reasons", "ladder", "features", "graphs captured"} <= sent.keys()


# ---------------------------------------------------------------------- hooks in force


def test_hooks_are_verified_in_force(zygote: Zygote) -> None:
    """After SGLang applied its hooks every wrap of ours is found in its target's chain."""
    done = zygote(code=_VERIFY.format(spoil=""))
    assert done.stdout.strip().splitlines()[-1] == "verified", done.stderr


def test_a_hook_that_did_not_take_stops_with_its_target(zygote: Zygote) -> None:
    """Another plugin replaced the method afterwards: named, with why it matters, instead of silence."""
    spoil = (
        "from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo\n"
        "MLPSyncBatchInfo.all_gather = lambda self, *a, **k: None\n"
    )
    done = zygote(code=_VERIFY.format(spoil=spoil))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "did not apply the hook on sglang.srt.managers.scheduler_components.dp_attn.MLPSyncBatchInfo.all_gather" in done.stderr
    assert "this rank's vote goes out" in done.stderr


_VERIFY = """
import os, signal, warnings
warnings.simplefilter("ignore")
signal.signal(signal.SIGQUIT, signal.SIG_IGN)
from sglang_bcg_dsa import stopping
stopping._tell_parent = lambda: None
import sglang.srt.managers.scheduler
os.environ["SGLANG_BCG_DSA"] = "1"
from sglang_bcg_dsa import activate
seen = []
from sglang_bcg_dsa.installer import Installer
original = Installer.__init__
def init(self, seams):
    original(self, seams)
    seen.append(self)
Installer.__init__ = init
activate.activate()
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
{spoil}
(installer,) = seen
assert set(installer.wrapped) >= {{"vote.batch", "vote.gather", "forward.decide", "runner.capture"}}, installer.wrapped
installer.verify()
print("verified")
"""


def test_verification_looks_through_other_plugins_wraps() -> None:
    """Another plugin's AROUND on top of ours does not hide it."""
    seams = examine()
    installer = Installer(seams)
    seam = seams["vote.gather"]
    hooks: list[Any] = []
    from sglang.srt.plugins.hook_registry import HookRegistry

    original = HookRegistry.register
    HookRegistry.register = lambda target, hook, kind: hooks.append(hook)  # type: ignore[method-assign, assignment, misc]
    try:
        installer.around("vote.gather", lambda call, *a, **k: call(*a, **k))
    finally:
        HookRegistry.register = original  # type: ignore[method-assign]
    from sglang.srt.plugins.hook_registry import HookType, _wrap_fn

    from sglang_bcg_dsa.installer import _in_force

    target = resolve(seam)
    ours = _wrap_fn(target, hooks[0], HookType.AROUND)
    theirs = _wrap_fn(ours, lambda call, *a, **k: call(*a, **k), HookType.AROUND)
    assert _in_force(ours, hooks[0])
    assert _in_force(theirs, hooks[0])
    assert not _in_force(target, hooks[0])


def test_the_environment_switches_an_engine_on(zygote: Zygote) -> None:
    """``sgl.Engine`` has no command line: the environment reaches its ``load_plugins``, which wraps the scheduler's seams.

    That spawned schedulers are reached as well is what every rehearsal shows.
    """
    code = (
        "import warnings; warnings.simplefilter('ignore')\n"
        "import sglang.srt.managers.scheduler\n"
        "from sglang.srt.plugins import load_plugins\n"
        "load_plugins()\n"
        "from sglang_bcg_dsa import activate\n"
        "from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo\n"
        "print('RESULT', activate._active is not None, hasattr(MLPSyncBatchInfo.all_gather, '__wrapped__'))\n"
    )
    for value, wanted in (("1", "RESULT True True"), ("0", "RESULT False False")):
        done = zygote(code=code, env={"SGLANG_BCG_DSA": value})
        assert wanted in done.stdout, done.stderr[-3000:]


def test_a_store_wait_is_bounded(store: dist.HashStore) -> None:
    """torch's own store gives up when told to; the exchange relies on it."""
    with pytest.raises(Exception, match=r"(?i)time|wait"):
        store.wait(["never"], timedelta(milliseconds=50))
