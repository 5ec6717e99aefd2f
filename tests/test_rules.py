"""Rules as pure functions, and SGLang's own resolution of arguments with the plugin and without.

The host's half runs on a machine without a GPU: ``tests/resolve.py`` says what is stood in for.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from sglang_bcg_dsa import stopping
from sglang_bcg_dsa.buckets import DEEPEP_MULTIPLE, aligned, deepep_multiple
from sglang_bcg_dsa.config import Audit, Config
from sglang_bcg_dsa.errors import StartupError
from sglang_bcg_dsa.hooks import rules as hooks_rules
from sglang_bcg_dsa.hooks.rules import RulesFeature
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.rules import RULES, Arguments, Host, hits, settle, staging_mb
from sglang_bcg_dsa.seams import examine, resolve
from sglang_bcg_dsa.testing.models import write_model
from tests.conftest import Zygote

SEAMS = examine()
OWN = "moe.native" in SEAMS
"""This host has graphs of its own for DSA models with DeepEP."""

# ---------------------------------------------------------------------- pure

CAUSES: dict[str, dict[str, Any]] = {
    "context_parallel": {"context_parallel": True},
    "decode_context_parallel": {"decode_context_parallel": True},
    "pipeline_parallel": {"pipeline_parallel": True},
    "lora": {"lora": True},
    "a2a": {"a2a": "mooncake"},
    "two_batch_overlap": {"two_batch_overlap": True},
    "single_batch_overlap": {"single_batch_overlap": True, "a2a": "deepep"},
    "multimodal": {"multimodal": True},
    "memory_saver": {"memory_saver": True},
    "eplb_lp": {"eplb_lp": True},
    "elastic": {"elastic": True},
    "kv_cache": {"fp8_kv": True},
    "dsa_prefill": {"dsa_prefill": "fa3"},
    "vote_off": {"vote": False, "attention_dp": 2},
    "moe_off": {"moe": False, "a2a": "deepep"},
    "low_latency": {"a2a": "deepep", "deepep_mode": "low_latency"},
}


@pytest.mark.parametrize("rule", RULES, ids=lambda r: r.name)
def test_each_rule_is_hit_by_its_cause_alone(rule: Any) -> None:
    """One cause, one rule: a message never blames what is not there."""
    assert [r.name for r in hits(Arguments(**CAUSES[rule.name]))] == [rule.name]
    assert all(part in str(rule) for part in (rule.name, rule.cause, rule.why, rule.cure))


def test_the_configuration_this_plugin_is_for_hits_nothing() -> None:
    """DSA, DeepEP in every mode that prefills, DP attention: allowed."""
    for mode, dp in itertools.product(("auto", "normal"), (1, 8)):
        assert hits(Arguments(a2a="deepep", deepep_mode=mode, attention_dp=dp)) == ()


OLDER = ("eplb_lp", "elastic", "kv_cache", "dsa_prefill", "vote_off", "moe_off", "low_latency")
"""Rules for hosts without graphs of their own for these models."""


@pytest.mark.parametrize("name", OLDER)
def test_a_host_with_its_own_break_does_not_need_ours(name: str) -> None:
    """What the plugin switches off there, SGLang does itself."""
    assert hits(Arguments(host=Host(own_break=True), **CAUSES[name])) == ()


def test_capabilities_of_the_host_lift_rules() -> None:
    """Pipeline stages, adapters and further all-to-all backends, where SGLang's own graphs take them."""
    assert not hits(Arguments(host=Host(pipeline=True), pipeline_parallel=True))
    assert not hits(Arguments(host=Host(lora=True), lora=True))
    assert not hits(Arguments(host=Host(own_break=True), a2a="megamoe"))
    assert hits(Arguments(a2a="megamoe"))


sizes = st.lists(st.integers(1, 20_000), min_size=1, max_size=60)


@given(sizes, st.integers(1, 32), st.none() | st.integers(64, 30_000), st.none() | st.integers(64, 30_000))
def test_a_settled_ladder_is_valid_aligned_and_usable(
    found: list[int], attention_tp: int, context: int | None, pool: int | None
) -> None:
    """Ascending, once each, multiples of 8 and of the ranks that share a bucket; nothing usable is lost."""
    multiple = deepep_multiple(attention_tp)
    try:
        ladder = settle(found, multiple, context, pool)
    except ValueError:
        assert context is not None
        assert context < multiple
        return
    assert list(ladder) == sorted(set(ladder))
    assert all(size % DEEPEP_MULTIPLE == 0 and size % attention_tp == 0 for size in ladder)
    assert context is None or ladder[-1] <= context
    assert pool is None or ladder[-1] < pool + multiple
    for size in found:
        if size <= min(context or size, pool or size) // multiple * multiple:
            assert any(size <= bucket < size + multiple for bucket in ladder)


@pytest.mark.parametrize(
    ("found", "words"), [([], "no bucket is left"), ([-8, 16], "bucket -8"), ([0], "bucket 0"), (["8"], "'8'"), ([True], "True")]
)
def test_a_ladder_that_cannot_be_is_refused(found: list[Any], words: str) -> None:
    """The message names the bucket."""
    with pytest.raises(ValueError, match=words):
        settle(found, 8, None, None)


def test_staging_is_two_copies_of_the_hidden_states() -> None:
    """56 MiB in DeepSeek-V3.2's shape with 2048 tokens: what the break was seen to hold, in MiB."""
    assert staging_mb(2048, 7168) == 56


# ---------------------------------------------------------------------- SGLang's resolution

DP = ["--dp", "8", "--enable-dp-attention"]
DEEPEP = ["--moe-a2a-backend", "deepep"]
EXPLICIT = ["--cuda-graph-backend-prefill", "breakable"]
MATRIX = list(
    itertools.product(("moe", "mla", "dsa"), (False, True), (None, "auto", "normal", "low_latency"), (False, True), (False, True))
)
SINGLES = {
    "single_batch_overlap": [*DEEPEP, "--enable-single-batch-overlap"],
    "two_batch_overlap": [*DEEPEP, "--enable-two-batch-overlap"],
    "a2a": ["--moe-a2a-backend", "mooncake"],
    "decode_context_parallel": ["--dcp-size", "2"],
    "context_parallel": ["--attn-cp-size", "2"],
    "pipeline_parallel": ["--pp-size", "2"],
    "lora": ["--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj"],
    "memory_saver": ["--enable-memory-saver"],
    "eplb_lp": [*DEEPEP, "--enable-eplb", "--ep-dispatch-algorithm", "lp"],
    "kv_cache": ["--kv-cache-dtype", "fp8_e4m3"],
    "dsa_prefill": ["--dsa-prefill-backend", "fa3"],
}
SWITCHED_OFF = {"vote_off": ["--dp", "8", "--enable-dp-attention"], "moe_off": DEEPEP}
LADDERS: dict[str, tuple[list[str], Any]] = {
    # name: arguments, and the ladder or the words of the refusal
    "unsorted": (["--cuda-graph-bs-prefill", "32", "16", "16", "64"], [16, 32, 64]),
    "negative": (["--cuda-graph-bs-prefill", "-8", "16"], "bucket -8 is not"),
    "empty": (["--cuda-graph-config", '{"prefill": {"bs": []}}'], "no bucket is left"),
    "words": (["--cuda-graph-config", '{"prefill": {"bs": ["a"]}}'], "bucket 'a' is not"),
    "tiny": ([*DEEPEP, "--cuda-graph-max-bs-prefill", "1"], "no bucket is left"),
    "pool": ([*DEEPEP, "--max-total-tokens", "1001", "--cuda-graph-bs-prefill", "512", "1024", "2048"], [512, 1008]),
    "context": (
        [*DEEPEP, "--context-length", "1020", "--cuda-graph-bs-prefill", "500", "1020", "4000"],
        [504, 1024, 4000] if OWN else [504, 1016],
    ),
    "sixteen ranks share a bucket": (["--tp", "16", *DEEPEP, "--cuda-graph-bs-prefill", "8", "40"], [16, 48]),
}
DSV4 = {
    "default": [], "deepep": [*DEEPEP, *DP], "listed": ["--cuda-graph-bs-prefill", "512", "2048"],
    "short": ["--mem-fraction-static", "0.985"], "short, chosen": ["--mem-fraction-static", "0.985", *EXPLICIT],
    "draft": ["--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1", "--speculative-eagle-topk", "1",
              "--speculative-num-draft-tokens", "2"],
    "nothing fits": ["--mem-fraction-static", "0.999999"], "overlap": ["--enable-two-batch-overlap", *DEEPEP],
}  # fmt: skip
OFF_BY = {
    "your arguments": ["--disable-prefill-cuda-graph"],
    "--disaggregation-mode decode|apply_cuda_graph_disaggregation_roles": ["--disaggregation-mode", "decode"],
    "a later step of SGLang|handle_other_validations": ["--debug-tensor-dump-output-folder", "dump"],
}


def argv(model: str, dp: bool, mode: str | None, listed: bool, explicit: bool) -> list[str]:
    return [
        "--model-path", model, "--tp", "8", *(DP if dp else []),
        *([*DEEPEP, "--deepep-mode", mode] if mode else []),
        *(["--cuda-graph-bs-prefill", "7", "9"] if listed else []), *(EXPLICIT if explicit else []),
    ]  # fmt: skip


class Resolved:
    """Results of all cases, by column and name."""

    def __init__(self, folder: Path, zygote: Zygote) -> None:
        models = {kind: str(write_model(folder / kind, kind)) for kind in ("moe", "mla")}  # type: ignore[arg-type]
        config = json.loads((folder / "mla/config.json").read_text())
        config |= {
            "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "index_topk": 16, "index_head_dim": 16,
            "index_n_heads": 4, "torch_dtype": "bfloat16", "hidden_size": 7168,
        }  # fmt: skip
        (folder / "dsa").mkdir()
        (folder / "dsa/config.json").write_text(json.dumps(config))
        models["dsa"] = str(folder / "dsa")
        dsa = ["--model-path", models["dsa"], "--tp", "8"]
        cases: dict[Any, list[str]] = {key: argv(models[key[0]], *key[1:]) for key in MATRIX}
        cases |= {(name, explicit): [*dsa, *more, *(EXPLICIT if explicit else [])]
                  for name, more in SINGLES.items() for explicit in (False, True)}  # fmt: skip
        cases |= {("ladder", name): [*dsa, *more, *EXPLICIT] for name, (more, _) in LADDERS.items()}
        cases |= {("off", name): [*dsa, *more] for name, more in OFF_BY.items()}
        config |= {
            "architectures": ["DeepseekV4ForCausalLM"], "model_type": "deepseek_v4", "index_topk": 512, "index_head_dim": 128,
            "index_n_heads": 64, "hidden_size": 4096, "num_attention_heads": 64, "num_key_value_heads": 1, "head_dim": 512,
            "qk_rope_head_dim": 64, "num_hidden_layers": 4, "compress_ratios": [0, 4, 128, 4], "hc_mult": 4, "hc_eps": 1e-6,
            "hc_sinkhorn_iters": 4, "num_hash_layers": 1, "o_lora_rank": 32, "o_groups": 8, "sliding_window": 128,
            "scoring_func": "sqrtsoftplus", "max_position_embeddings": 2**20, "compress_rope_theta": 40000.0,
        }  # fmt: skip
        (folder / "dsv4").mkdir()
        (folder / "dsv4/config.json").write_text(json.dumps(config))
        v4 = ["--model-path", str(folder / "dsv4"), "--tp", "8"]
        cases |= {("dsv4", name): [*v4, *more] for name, more in DSV4.items()}
        cases["nothing", ""] = ["--model-path", "dummy"]
        cases["decode", "breakable"] = [*dsa, *DEEPEP, "--cuda-graph-backend-decode", "breakable"]
        (folder / "off.toml").write_text("".join(f"[{name}]\nenabled = false\n" for name in ("vote", "moe", "attention")))
        switched = {(name, explicit): [*dsa, *more, *(EXPLICIT if explicit else [])]
                    for name, more in SWITCHED_OFF.items() for explicit in (False, True)}  # fmt: skip
        switched["dsv4", "default"] = v4
        saver = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}
        on = {"SGLANG_BCG_DSA": "1", **saver}
        columns = {
            "host": (saver, cases), "plugin": (on, cases),
            "off": (on | {"SGLANG_BCG_DSA_CONFIG": str(folder / "off.toml")}, switched),
        }  # fmt: skip
        groups = {name: {"env": env, "cases": list(these.values())} for name, (env, these) in columns.items()}
        (folder / "groups").write_text(json.dumps(groups))
        done = zygote(code=f"from tests.resolve import main; main({str(folder / 'groups')!r})")
        assert done.returncode == 0, done.stderr[-3000:]
        (line,) = [s for s in done.stdout.splitlines() if s.startswith("RESULT")]
        found = json.loads(line.removeprefix("RESULT"))
        self.columns = {name: dict(zip(these, found[name], strict=True)) for name, (_, these) in columns.items()}

    def __call__(self, *key: Any, column: str = "plugin") -> dict[str, Any]:
        result: dict[str, Any] = self.columns[column][key]
        return result


@pytest.fixture(scope="module")
def resolved(tmp_path_factory: pytest.TempPathFactory, zygote: Zygote) -> Resolved:
    """All command lines, resolved once by the host alone and once with the plugin."""
    return Resolved(tmp_path_factory.mktemp("resolved"), zygote)


def expected(model: str, dp: bool, mode: str | None, listed: bool, explicit: bool) -> Any:
    """The contract: ``error``, ``off``, or the ladder's (first, last) and its multiple."""
    ours = model == "dsa" or (model == "mla" and (explicit or OWN))
    if ours and mode == "low_latency" and not OWN:
        return "error" if explicit else "off"
    if not ours and not OWN and not explicit and (model == "mla" or dp or mode):
        return "off"
    if model == "moe" and mode == "normal":
        return "off"
    multiple = 8 if mode else 1
    if listed:
        ladder = aligned([7, 9], multiple)
        return ladder[0], ladder[-1], multiple
    largest = 1024 if dp else 8192 if OWN or model == "moe" else 2048
    # The tiny models' context has 4096 tokens, and a bucket is captured as one request before 0.5.17.
    return max(4, multiple), min(largest, 4096) if ours and not OWN else largest, multiple


@pytest.mark.parametrize("key", MATRIX, ids=str)
def test_resolution_ends_as_the_rules_say(resolved: Resolved, key: Any) -> None:
    """DP, DeepEP's modes, ladders, models and backends: on with an aligned ladder, off with a reason, or one error."""
    result, want = resolved(*key), expected(*key)
    if want == "error":
        assert result["status"] == 2, result
        assert "rule low_latency" in result["error"]
        return
    assert "error" not in result, result
    lines = [line for line in result["log"] if line.startswith("sglang-bcg-dsa: prefill graphs: ")]
    assert len(lines) == 1, "one final line"
    if want == "off":
        assert result["backend"] == "disabled"
        assert lines[0].startswith("sglang-bcg-dsa: prefill graphs: off, by ")
        return
    assert result["backend"] == "breakable"
    assert (result["bs"][0], result["bs"][-1]) == want[:2]
    assert all(size % want[2] == 0 for size in result["bs"])
    assert lines[0].startswith("sglang-bcg-dsa: prefill graphs: on, backend breakable, ")
    if want[2] > 1:
        assert result["max_bs"] == result["bs"][-1]
    if key[2] == "normal":
        assert result["decode"] == "disabled", "decode graphs are left as SGLang has them"


def test_the_host_alone_ends_elsewhere(resolved: Resolved) -> None:
    """The matrix can fail: without the plugin its decisive cases come out differently."""
    normal = resolved("dsa", False, "normal", False, True, column="host")
    assert normal["backend"] == "disabled"
    unaligned = resolved("dsa", True, "auto", False, True, column="host")
    assert unaligned["bs"][0] == 4
    default = resolved("dsa", True, "auto", False, False, column="host")
    listed = resolved("dsa", True, "auto", True, True, column="host")
    if OWN:
        assert resolved("dsa", False, "auto", False, False, column="host")["max_bs"] == 2048, "an accidental cap"
        assert default["bs"][0] == 4
    else:
        assert default["backend"] == "disabled"
        assert listed["bs"] == [7, 9]
        assert listed["max_bs"] != 9, "and its two sizes disagree"


# Supported by 0.5.23's own graphs; PP there is off unless asked for.
CAPABLE = {"pipeline_parallel": "rules.pipeline", "lora": "runner.limit.enable_lora"}
LIFTED = {name for name, seam in CAPABLE.items() if seam in SEAMS} | (set(OLDER) if OWN else set())


@pytest.mark.parametrize("name", SINGLES)
def test_what_is_unsafe_is_off_by_default_and_an_error_on_demand(resolved: Resolved, name: str) -> None:
    """By default one line names rule, cause and cure; a chosen backend does not get past the rule."""
    default, chosen = resolved(name, False), resolved(name, True)
    if name in LIFTED:
        assert chosen["backend"] == "breakable"
        return
    assert default["backend"] == "disabled", default
    (rule,) = [r for r in RULES if r.name == name]
    if not OWN or name in ("single_batch_overlap", "memory_saver"):
        assert [line for line in default["log"] if str(rule) in line], default["log"]
        assert default["log"][-1].endswith(f"off, by rule {name}")
    assert chosen["status"] == 2
    assert chosen["kind"] == "RuleError"
    assert str(rule) in chosen["error"]
    assert resolved(name, True, column="host")["backend"] == "breakable", "SGLang alone lets it through"


def test_breakable_decode_graphs_and_our_break_do_not_meet(resolved: Resolved) -> None:
    """The break runs DeepEP's normal mode; a decode graph that holds it would dispatch in the wrong one."""
    found = resolved("decode", "breakable")
    assert OWN or (found["status"] == 2 and "--cuda-graph-backend-decode full" in found["error"]), found
    assert not OWN or found["decode"] == "breakable"


@pytest.mark.parametrize("name", SWITCHED_OFF)
def test_features_switched_off_are_a_reason_too(resolved: Resolved, name: str) -> None:
    """Without our vote or break, hosts that have none of their own keep prefills eager."""
    default, chosen = resolved(name, False, column="off"), resolved(name, True, column="off")
    if OWN:
        assert default["backend"] == chosen["backend"] == "breakable"
        return
    assert default["log"][-1].endswith(f"off, by rule {name}")
    assert f"rule {name}" in chosen["error"]


def test_doctor_says_what_a_feature_that_is_off_costs() -> None:
    """Where SGLang has no break and no vote of its own, switching ours off keeps prefills eager, and it is said."""
    off = msgspec.structs.replace(Config(), vote=msgspec.structs.replace(Config().vote, enabled=False))
    reason = RulesFeature(dict).bcg_feature(off, SEAMS).reason
    assert ("rule vote_off keeps prefills eager" in reason) == (not OWN)
    assert "_off" not in RulesFeature(dict).bcg_feature(Config(), SEAMS).reason


@pytest.mark.parametrize("name", LADDERS)
def test_odd_ladders_end_sound_or_in_one_error(resolved: Resolved, name: str) -> None:
    """Unsorted, negative, empty, above pool or context: a valid ladder that is logged, or a message with the bucket."""
    result, want = resolved("ladder", name), LADDERS[name][1]
    if isinstance(want, str):
        assert result["status"] == 2, result
        assert want in result["error"]
        assert "--disable-prefill-cuda-graph" in result["error"]
        return
    assert result["bs"] == want
    assert result["max_bs"] == want[-1]
    assert len([line for line in result["log"] if line.startswith("sglang-bcg-dsa: prefill buckets ")]) == 1


@pytest.mark.parametrize("who", OFF_BY)
def test_the_last_line_says_who_switched_graphs_off(resolved: Resolved, who: str) -> None:
    """The user, a role, or a step of SGLang."""
    result = resolved("off", who)
    assert result["backend"] == "disabled"
    assert any(word in result["log"][-1] for word in who.split("|")), result["log"]


def test_nothing_to_resolve_is_nothing_to_judge(resolved: Resolved) -> None:
    """SGLang's dummy model path has no graphs to speak of."""
    assert resolved("nothing", "")["backend"] is None
    assert resolved("nothing", "")["log"] == []


def test_memory_for_the_break_is_set_aside_and_shown(resolved: Resolved) -> None:
    """On hosts that do not count DeepEP's part: 1 GiB and the staging buffers, so the static share shrinks."""
    mine, host = resolved("dsa", False, "auto", False, True), resolved("dsa", False, "auto", False, True, column="host")
    lines = [line for line in mine["log"] if "set aside" in line]
    if OWN:
        assert not lines
        assert mine["mem"] == host["mem"]
        return
    # 2048 tokens over 8 attention-TP ranks, 7168 wide, in and out, two bytes.
    want = "MB set aside for graphs: SGLang 2560, DeepEP's pool and first touch 1024, staging buffers for 256 tokens 7"
    assert lines == [f"sglang-bcg-dsa: {2560 + 1024 + 7} {want}"]
    assert host["mem"] - mine["mem"] == pytest.approx(1031 / (141 * 1024), abs=0.001)


def test_dsv4_graphs_are_on_and_their_memory_is_set_aside(resolved: Resolved) -> None:
    """SGLang switches them off on every release; with the plugin they are on, and the static share leaves them room."""
    for name in ("default", "deepep", "listed"):
        mine, host = resolved("dsv4", name), resolved("dsv4", name, column="host")
        assert (mine["backend"], host["backend"]) == ("breakable", "disabled"), (name, mine)
        assert mine["mem"] < host["mem"]
        assert any("set aside for DSV4 graphs" in line for line in mine["log"])
    assert all(size % 8 == 0 for size in resolved("dsv4", "deepep")["bs"])
    assert resolved("dsv4", "listed")["bs"] == [512, 2048]
    assert resolved("dsv4", "overlap")["log"][-1].endswith("off, by rule two_batch_overlap")


def test_dsv4_graphs_without_room_say_what_would_fit(resolved: Resolved) -> None:
    """Off by default, an error on demand: what they want, what is missing, which ladder or context would fit."""
    default, chosen = resolved("dsv4", "short"), resolved("dsv4", "short, chosen")
    assert default["backend"] == "disabled"
    assert default["log"][-1].endswith("prefill graphs: off, by its memory estimate")
    assert chosen["status"] == 2, chosen
    for text in ("\n".join(default["log"]), chosen["error"]):
        assert "are missing; --cuda-graph-max-bs-prefill " in text
        assert " or --context-length " in text
        assert "a lower --mem-fraction-static would fit" in text
    nothing = "\n".join(resolved("dsv4", "nothing fits")["log"])
    assert "are missing; a lower --mem-fraction-static would fit" in nothing


def test_a_draft_model_s_tables_are_set_aside_where_the_host_keeps_them(resolved: Resolved) -> None:
    """SGLang 0.5.16 captures the draft of every bucket at the full context; later ones at the live width."""
    def reserved(name: str) -> float:
        (line,) = [s for s in resolved("dsv4", name)["log"] if "set aside for DSV4 graphs" in s][-1:]
        return float(line.split()[1])

    assert resolved("dsv4", "draft")["backend"] == "breakable", resolved("dsv4", "draft")
    more = reserved("draft") - reserved("default")
    # Four bytes for pages of 256 tokens, blocks of 128, the window and the selected slots twice.
    rows = sum(resolved("dsv4", "default")["bs"])
    assert more == pytest.approx(0 if OWN else rows * 4 * (2**12 + 2**13 + 128 + 2 * 512) / 2**20, abs=1)


if "rules.arg.dsv4_attn_backend" in SEAMS:  # a host with two attention backends for it

    def test_dsv4_with_trt_llm_attention_is_left_to_sglang(monkeypatch: pytest.MonkeyPatch) -> None:
        """That backend is not ours: its graphs pin scores of the full context, which SGLang switches off."""
        view = SimpleNamespace(dsv4_attn_backend="flashmla")
        config = SimpleNamespace(model_type="deepseek_v4", architectures=["DeepseekV4ForCausalLM"])
        answers: dict[str, Any] = {"rules.view": lambda _: view, "rules.model": lambda _: SimpleNamespace(hf_config=config)}
        monkeypatch.setattr(hooks_rules, "resolve", lambda seam: answers.get(seam.key) or resolve(seam))
        asked = RulesFeature(lambda: {"features": {"attention": "extended"}})
        asked._seams = SEAMS
        assert asked._model(None) == "dsv4"
        view.dsv4_attn_backend = "trtllm"
        assert asked._model(None) == "other"


def test_dsv4_without_our_attention_is_left_to_sglang(resolved: Resolved) -> None:
    """Its own graphs would pin scores of the full context: they stay off where SGLang has them off."""
    assert resolved("dsv4", "default", column="off")["backend"] == "disabled"


# ---------------------------------------------------------------------- the ranks


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Threads with a rank of their own over one store, in a group of ``ranks.world``; nobody is signalled."""
    store, state = dist.HashStore(), SimpleNamespace(world=2, here=threading.local())
    monkeypatch.setattr(hooks_rules, "group", lambda: (store, state.here.rank, state.world))
    monkeypatch.setattr(stopping, "_tell_parent", lambda: None)
    return state


def feature(seconds: float = 20.0) -> RulesFeature:
    """The feature as a rank has it."""
    made = RulesFeature(dict)
    config = msgspec.structs.replace(Config(), audit=Audit(exchange_seconds=seconds))
    made.bcg_install(
        config=config, seams=SEAMS, reasons=ReasonTable(), installer=SimpleNamespace(around=lambda *a: None)  # type: ignore[arg-type]
    )
    return made


def gate(free: float, locked: set[tuple[str, str]]) -> bool:
    """The host's gate, or on hosts that dropped it, the same."""
    if "rules.memory" in SEAMS:
        return bool(resolve(SEAMS["rules.memory"])(free, locked))
    return ("prefill", "backend") not in locked and free < 4.0


@pytest.mark.parametrize(("free", "skip"), [([10.0, 3.9, 10.0], True), ([10.0, 4.1, 10.0], False)])
def test_ranks_with_too_little_memory_decide_for_all(
    ranks: Any, caplog: pytest.LogCaptureFixture, free: list[float], skip: bool
) -> None:
    """One rank below the limit keeps every rank eager, and the log says which had how much; twice, as drafts ask too."""
    ranks.world = 3

    def rank(number: int) -> list[bool]:
        ranks.here.rank, mine = number, feature()
        return [mine.on_memory(gate, free[number], set()), mine.on_memory(gate, 10.0, set())]

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(rank, range(3))) == [[skip, False]] * 3
    assert [gate(gb, set()) for gb in free] == [False, skip, False], "alone, the ranks would have split"
    assert ("rank 0 10.00, rank 1 3.90" in caplog.text) is skip


def test_a_backend_that_was_chosen_asks_nobody(ranks: Any) -> None:
    """The host's gate is for graphs by default; no exchange then."""
    assert feature().on_memory(gate, 0.1, {("prefill", "backend")}) is False


def test_a_rank_that_does_not_tell_its_memory_is_named(ranks: Any) -> None:
    """A rank without the plugin stops the start instead of leaving the others waiting."""
    ranks.here.rank = 0
    with pytest.raises(StartupError, match=r"rank 1 did not say within 0\.2 s"):
        feature(0.2).on_memory(gate, 10.0, set())


def test_the_flag_is_early_enough_and_the_refusal_is_one_line(zygote: Zygote, tmp_path: Path) -> None:
    """``--plugins`` arrives with the arguments themselves: the hooks are in force for them, and the error is said once."""
    line = ["--model-path", str(write_model(tmp_path / "m", "mla")), "--device", "cpu", "--skip-tokenizer-init", "--plugins",
            "bcg_dsa", "--load-format", "dummy", *EXPLICIT, "--tp", "2", "--cuda-graph-bs-prefill"]  # fmt: skip
    code = (
        "from sglang.srt.plugins import load_plugins\nfrom sglang.srt.server_args import prepare_server_args\n"
        "load_plugins()\nargs = prepare_server_args({})\ngetattr(args, 'resolve_once', lambda: None)()\n"
    )
    done = zygote(code=code.format([*line, "-8", "16"]))
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("sglang-bcg-dsa: prefill buckets [-8, 16]: bucket -8 is not") == 1
    assert "Traceback" not in done.stderr
    done = zygote(code=code.format([*line, "16", "8"]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "prefill graphs: on, backend breakable, [8, 16]" in done.stderr


def test_no_fact_is_read_for_nothing() -> None:
    """Every field of the facts is part of the cause of some rule."""
    used = {name for cause in CAUSES.values() for name in cause} | {"host"}
    assert used == {field.name for field in dataclasses.fields(Arguments)}
