"""Builtin feature ``rules``: prefill graphs where they are safe, with buckets that fit, and why not elsewhere.

Contract: works on SGLang's arguments while and after they are resolved, in the process that
resolves them; ranks get the result. By default the rules decide for DSA models and DeepSeek-V4 (and,
where SGLang has graphs for them, plain MLA models); what they hit is switched off, with one line in
the log. Where the user chose ``breakable`` for one of these, SGLang asks nobody: then a hit ends the
start. DeepSeek-V4, which SGLang switches off for its memory, is asked for memory here instead; see
:mod:`sglang_bcg_dsa.memory`. Other models are SGLang's business. Whatever the model, breakable graphs end with a valid
ladder, aligned for DeepEP after the last step that could change it. Plain MLA stays off by default on
0.5.16: SGLang had it off there and in 0.5.17, and nobody has shown it right on a GPU.

One part runs on the ranks: too little free memory on one rank keeps all of them eager.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from sglang_bcg_dsa import environment
from sglang_bcg_dsa.buckets import deepep_multiple
from sglang_bcg_dsa.config import Config
from sglang_bcg_dsa.errors import StartupError
from sglang_bcg_dsa.exchange import Missing, publish_and_collect
from sglang_bcg_dsa.hooks import hookimpl
from sglang_bcg_dsa.installer import Installer
from sglang_bcg_dsa.memory import Shape, draft_mb, graph_mb, shortage, tables_mb
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Feature, State
from sglang_bcg_dsa.rollcall import group
from sglang_bcg_dsa.rules import DEEPEP_RESERVE_MB, Arguments, Host, Rule, RuleError, hits, settle, staging_mb, text
from sglang_bcg_dsa.seams import SeamSet, resolve
from sglang_bcg_dsa.stopping import refuse

logger = logging.getLogger(__name__)

BREAKABLE, DISABLED = "breakable", "disabled"
_MEMORY = "sglang_bcg_dsa/memory"
_OWN_DRAFT = {"EAGLE", "NEXTN"}
"""Algorithms that draft with DeepSeek-V4's own extra layer and capture its prefills."""
_ACTIVE = {State.SUPPLIED.value, State.EXTENDED.value}


class Run:
    """One resolution in progress: what the user asked for, and who switched prefill graphs off."""

    def __init__(self, asked: Mapping[str, Any]) -> None:
        self.asked = asked
        self.off_by = "your arguments" if asked.get("backend") == DISABLED else ""

    @property
    def explicit(self) -> bool:
        """Whether the user chose breakable graphs."""
        return bool(self.asked.get("backend") == BREAKABLE)


class RulesFeature:
    """Rules, ladder and memory of prefill graphs."""

    name = "rules"

    def __init__(self, states: Callable[[], Mapping[str, Any]]) -> None:
        self._states = states
        self._run: Run | None = None

    # ------------------------------------------------------------------ plugin hooks

    @hookimpl
    def bcg_feature(self, config: Config, seams: SeamSet) -> Feature:
        if "moe.native" in seams:
            return Feature(self.name, State.EXTENDED, "SGLang's rules do not hold for a backend the user chose")
        off = [name for name in ("vote", "moe") if config.enabled(name) is False]
        cost = f"; with {' and '.join(off)} off, rule {' and '.join(f'{n}_off' for n in off)} keeps prefills eager" if off else ""
        return Feature(self.name, State.SUPPLIED, f"SGLang switches prefill graphs off for these models{cost}")

    @hookimpl
    def bcg_install_arguments(self, config: Config, seams: SeamSet, installer: Installer) -> None:
        self._seams = seams
        self._host = Host(
            own_break="moe.native" in seams, pipeline="rules.pipeline" in seams, lora="runner.limit.enable_lora" in seams
        )
        installer.around("rules.resolve", self.on_resolve)
        installer.around("rules.judge", self.on_judge)
        installer.around("rules.a2a", self.on_a2a)
        if "rules.align" in seams:
            installer.around("rules.align", self.on_align)
        if "rules.declare" in seams:
            installer.after("rules.declare", self.on_declare)
        if "rules.reserve" in seams:
            installer.after("rules.reserve", self.on_reserve)

    @hookimpl
    def bcg_install(self, config: Config, seams: SeamSet, reasons: ReasonTable, installer: Installer) -> None:
        self._exchange_seconds = config.audit.exchange_seconds
        self._asked_memory = 0
        if "rules.memory" in seams:
            installer.around("rules.memory", self.on_memory)

    # ------------------------------------------------------------------ while arguments are resolved

    def on_resolve(self, original: Callable[..., None], server_args: Any) -> None:
        """The whole resolution, then the last word about prefill graphs."""
        outer, self._run = self._run, Run(_asked(server_args))
        try:
            original(server_args)
            self._finish(server_args, self._run)
        except StartupError as error:
            error.announce()
            raise
        finally:
            self._run = outer

    def on_judge(self, original: Callable[..., None], server_args: Any) -> None:
        """SGLang decides whether breakable graphs stay on by default."""
        model = self._model(server_args)
        if model != "dsv4" and (self._host.own_break or model != "dsa"):
            original(server_args)
            self._note(server_args, "SGLang's rules for this model")
        if model != "other" and self._backend(server_args) == BREAKABLE:
            self._off(server_args, hits(self._arguments(server_args)))

    def on_a2a(self, original: Callable[..., None], server_args: Any) -> None:
        """DeepEP's normal mode is no reason against prefill graphs: the break runs in it. Decode is left off."""
        before = self._backend(server_args)
        original(server_args)
        view = self._view(server_args)
        if before != BREAKABLE or view.cuda_graph_config.prefill.backend != DISABLED:
            return
        if (view.moe_a2a_backend, view.deepep_mode) == ("deepep", "normal") and self._model(server_args) != "other":
            self._write(server_args, backend=BREAKABLE)
            logger.info("sglang-bcg-dsa: --deepep-mode normal keeps prefill graphs; decode graphs stay off")
        else:
            self._note(server_args, "SGLang's step for MoE all-to-all backends")

    def on_align(self, original: Callable[..., None], server_args: Any) -> None:
        """SGLang's early alignment gives way to the one at the end."""
        if self._run is None:
            original(server_args)

    def on_declare(self, result: None, server_args: Any, source: str, **fields: Any) -> None:
        """Remember which step of SGLang switched prefill graphs off."""
        config = fields.get("cuda_graph_config")
        if self._run is not None and not isinstance(config, dict | None):
            off = config.prefill.backend == DISABLED
            self._run.off_by = (self._run.off_by or f"SGLang's step {source.strip('_')}") if off else ""

    def on_reserve(self, result: float, server_args: Any) -> float | None:
        """SGLang's figure of MiB for graphs, plus what DSV4's graphs take and, where it is ours, DeepEP's break."""
        view = self._view(server_args)
        phase = view.cuda_graph_config.prefill
        if phase.backend != BREAKABLE or view.disaggregation_mode == "decode":
            return None
        if self._model(server_args) == "dsv4" and (ladder := [n for n in _sizes(phase) if isinstance(n, int) and n > 0]):
            shape, context = self._shape(server_args), self._model_config(server_args).context_len
            own = graph_mb(ladder, shape) + tables_mb(max(ladder), context, shape) + draft_mb(ladder, context, shape)
            logger.info("sglang-bcg-dsa: %.0f MB set aside for DSV4 graphs: buckets up to %d, contexts up to %d tokens",
                        own, max(ladder), context)  # fmt: skip
            result += own
        if self._host.own_break or view.moe_a2a_backend != "deepep":
            return result
        largest = max((n for n in _sizes(phase) if isinstance(n, int)), default=0) // self._attention_tp(view)
        staging = staging_mb(largest, self._model_config(server_args).hidden_size)
        logger.info(
            "sglang-bcg-dsa: %.0f MB set aside for graphs: SGLang %.0f, DeepEP's pool and first touch %.0f, "
            "staging buffers for %d tokens %.0f",
            result + DEEPEP_RESERVE_MB + staging, result, DEEPEP_RESERVE_MB, largest, staging,
        )  # fmt: skip
        return result + DEEPEP_RESERVE_MB + staging

    # ------------------------------------------------------------------ at the end of the resolution

    def _finish(self, server_args: Any, run: Run) -> None:
        config = self._view(server_args).cuda_graph_config
        if config is None or isinstance(config, dict):
            return  # a dummy model path: nothing was resolved
        if config.prefill.backend == BREAKABLE:
            against = hits(self._arguments(server_args)) if self._model(server_args) != "other" else ()
            if against and run.explicit:
                raise RuleError(f"prefill graphs were asked for and are unsafe here: {_listed(against)}")
            self._off(server_args, against)
        if self._backend(server_args) == BREAKABLE:
            self._ladder(server_args, run)
        if self._backend(server_args) == BREAKABLE and self._model(server_args) == "dsv4":
            self._memory(server_args, run)
        view = self._view(server_args)
        if not self._host.own_break and config.decode.backend == BREAKABLE and view.moe_a2a_backend == "deepep":
            raise RuleError(
                "breakable decode graphs with DeepEP: the MoE break runs DeepEP's normal mode, decode needs its "
                "low-latency one; use --cuda-graph-backend-decode full"
            )
        phase = view.cuda_graph_config.prefill
        if phase.backend == DISABLED:
            decodes = "--disaggregation-mode decode" if view.disaggregation_mode == "decode" else ""
            by = run.off_by or decodes or "a later step of SGLang; its own warning is above"
            logger.warning("sglang-bcg-dsa: prefill graphs: off, by %s", by)
        else:
            logger.info("sglang-bcg-dsa: prefill graphs: on, backend %s, %s", phase.backend, text(phase.bs or ()))

    def _ladder(self, server_args: Any, run: Run) -> None:
        """Give breakable graphs a valid ladder, aligned for DeepEP, or say why there is none."""
        view = self._view(server_args)
        phase = view.cuda_graph_config.prefill
        before = _sizes(phase)
        deepep = view.moe_a2a_backend == "deepep"
        multiple = deepep_multiple(self._attention_tp(view)) if deepep else 1
        # A host with graphs of its own for these models captures a bucket as several requests.
        ours = self._model(server_args) != "other"
        context = self._model_config(server_args).context_len if ours and not self._host.own_break else None
        try:
            after = list(settle(before, multiple, context, view.max_total_tokens))
        except ValueError as error:
            cure = "change --cuda-graph-bs-prefill or --cuda-graph-max-bs-prefill, or pass --disable-prefill-cuda-graph"
            if run.asked.keys() & {"backend", "bs", "max_bs"}:
                raise RuleError(f"prefill buckets {text(before)}: {error}; {cure}") from None
            run.off_by = f"its ladder: {error}"
            self._write(server_args, backend=DISABLED)
            return
        if after != before:
            why = [f"multiples of {multiple} for DeepEP"] if deepep else []
            if max(before) > after[-1]:
                why.append(f"no batch that fits a graph is larger than {after[-1]} tokens")
            logger.warning("sglang-bcg-dsa: prefill buckets %s -> %s: %s", text(before), text(after),
                           "; ".join(why) or "ascending, each once")  # fmt: skip
        if after != before or (deepep and phase.max_bs != after[-1]):
            self._write(server_args, bs=after, max_bs=after[-1])

    def _memory(self, server_args: Any, run: Run) -> None:
        """DSV4 graphs fit beside the static share of memory, or it is said what is missing and what would fit."""
        view, context = self._view(server_args), self._model_config(server_args).context_len
        total = resolve(self._seams["rules.capacity"])(view.device)
        if total is None or view.mem_fraction_static is None:
            return  # no device is known: nothing to judge by
        left, ladder = total * (1 - view.mem_fraction_static), _sizes(view.cuda_graph_config.prefill)
        short = shortage(left, ladder, context, self._shape(server_args))
        if short is None:
            return
        fits = [f"--cuda-graph-max-bs-prefill {short.tokens}"] if short.tokens else []
        fits += [f"--context-length {short.context}"] if short.context else []
        message = (
            f"DeepSeek-V4's prefill graphs want about {short.need:.0f} MB for buckets up to {ladder[-1]} and contexts up to "
            f"{context} tokens; --mem-fraction-static {view.mem_fraction_static:g} leaves {left:.0f}, {short.missing:.0f} are "
            f"missing; {' or '.join([*fits, 'a lower --mem-fraction-static'])} would fit, or pass --disable-prefill-cuda-graph"
        )
        if run.explicit:
            raise RuleError(message)
        self._write(server_args, backend=DISABLED)
        run.off_by = "its memory estimate"
        logger.warning("sglang-bcg-dsa: feature rules keeps prefills eager: %s", message)

    def _shape(self, server_args: Any) -> Shape:
        view, config = self._view(server_args), self._model_config(server_args).hf_config
        heads = -(-config.num_attention_heads // self._attention_tp(view))
        return Shape(
            hidden=config.hidden_size, streams=config.hc_mult, heads=max(heads, 64), index_heads=config.index_n_heads,
            topk=config.index_topk, chunked="dsv4.budget" in self._seams,
            wide_draft=view.speculative_algorithm in _OWN_DRAFT and "dsv4.narrow" not in self._seams,
        )  # fmt: skip

    def _off(self, server_args: Any, against: tuple[Rule, ...]) -> None:
        if not against:
            return
        self._write(server_args, backend=DISABLED)
        assert self._run is not None
        self._run.off_by = f"rule {against[0].name}"
        logger.warning("sglang-bcg-dsa: feature rules keeps prefills eager: %s", _listed(against))

    # ------------------------------------------------------------------ on the ranks

    def on_memory(self, original: Callable[..., bool], available_memory_gb: float, locked: Any) -> bool:
        """The decision of the rank with the least memory, on every rank: an eager one would hang the others."""
        if not original(0.0, locked):
            return False
        store, rank, world = group()
        self._asked_memory += 1
        record, limit = {"gib": available_memory_gb}, self._exchange_seconds
        try:
            records = publish_and_collect(store, f"{_MEMORY}/{self._asked_memory}", rank, world, record, limit)
        except Missing as missing:
            who = ", ".join(map(str, missing.ranks))
            raise refuse(
                f"rank {who} did not say within {limit:g} s how much memory it has (rank {rank} waited). Most likely the "
                "plugin is not active there: install sglang-bcg-dsa on that node and name it in --plugins there too"
            ) from None
        free = [float(other["gib"]) for other in records]
        skip = bool(original(min(free), locked))
        if skip:
            listing = ", ".join(f"rank {other} {gib:.2f}" for other, gib in enumerate(free))
            logger.warning("sglang-bcg-dsa: all ranks keep prefills eager, too little memory on one; GiB free: %s", listing)
        return skip

    # ------------------------------------------------------------------ reading and writing arguments

    def _view(self, server_args: Any) -> Any:
        return resolve(self._seams["rules.view"])(server_args)

    def _backend(self, server_args: Any) -> str:
        return str(self._view(server_args).cuda_graph_config.prefill.backend)

    def _note(self, server_args: Any, who: str) -> None:
        if self._run is not None and self._backend(server_args) == DISABLED:
            self._run.off_by = self._run.off_by or who

    def _write(self, server_args: Any, **changes: Any) -> None:
        if "rules.with_phase" in self._seams:
            config = resolve(self._seams["rules.with_phase"])(
                self._view(server_args).cuda_graph_config, "prefill", **changes
            )
            resolve(self._seams["rules.declare"])(server_args, "sglang_bcg_dsa", cuda_graph_config=config)
            return
        for name, value in changes.items():
            setattr(server_args.cuda_graph_config.prefill, name, value)

    def _model_config(self, server_args: Any) -> Any:
        return resolve(self._seams["rules.model"])(server_args)

    def _model(self, server_args: Any) -> str:
        """``dsa``, ``dsv4``, ``mla`` or ``other``: a model whose graphs are SGLang's business."""
        config = self._model_config(server_args)
        if resolve(self._seams["rules.is_dsv4"])(config.hf_config):
            # DeepSeek-V4.1 has the same architecture name and other compressors; TRT-LLM's attention a backend of its
            # own, whose graphs pin scores of the full context.
            others = config.hf_config.model_type.startswith("deepseek_v41") or (
                "rules.arg.dsv4_attn_backend" in self._seams and self._view(server_args).dsv4_attn_backend == "trtllm"
            )
            return "dsv4" if self._states()["features"]["attention"] in _ACTIVE and not others else "other"
        if resolve(self._seams["rules.is_dsa"])(config.hf_config):
            return "dsa"
        return "mla" if config.attention_arch is resolve(self._seams["rules.architectures"]).MLA else "other"

    def _attention_dp(self, view: Any) -> int:
        if "rules.attention_dp" in self._seams:
            return int(view.attn_dp_size)
        return int(view.dp_size) if view.enable_dp_attention else 1

    def _attention_tp(self, view: Any) -> int:
        return max(1, int(view.tp_size) // self._attention_dp(view) // max(1, int(view.attn_cp_size)))

    def _arguments(self, server_args: Any) -> Arguments:
        view, model, features = self._view(server_args), self._model_config(server_args), self._states()["features"]
        split = view.attn_cp_size > 1 or view.enable_prefill_cp
        return Arguments(
            host=self._host,
            a2a=view.moe_a2a_backend,
            deepep_mode=view.deepep_mode,
            attention_dp=self._attention_dp(view),
            context_parallel=bool(
                split and not ("rules.cp" in self._seams and resolve(self._seams["rules.cp"])(server_args))
            ),
            decode_context_parallel=view.dcp_size > 1,
            pipeline_parallel=view.pp_size > 1,
            lora=bool(view.enable_lora or view.lora_paths),
            two_batch_overlap=bool(view.enable_two_batch_overlap),
            single_batch_overlap=bool(view.enable_single_batch_overlap),
            multimodal=bool(model.is_multimodal and not model.is_multimodal_breakable_cuda_graph_supported),
            **self._older(view, server_args),
            memory_saver=bool(view.enable_memory_saver and environment.saves_graph_memory()),
            vote=features["vote"] in _ACTIVE,
            moe=features["moe"] in _ACTIVE,
        )

    def _older(self, view: Any, server_args: Any) -> dict[str, Any]:
        """Facts of rules for hosts without graphs of their own for these models."""
        if self._host.own_break:
            return {}
        found = {
            "eplb_lp": bool(view.enable_eplb and view.ep_dispatch_algorithm == "lp"),
            "elastic": view.elastic_ep_backend is not None,
        }
        if self._model(server_args) == "dsa":
            # Both are None, or "auto", until a later step of the resolution; the rules are asked again at its end.
            found["fp8_kv"] = str(view.kv_cache_dtype).startswith(("fp8", "fp4"))
            found |= {"dsa_prefill": view.dsa_prefill_backend} if view.dsa_prefill_backend else {}
        return found


def _sizes(phase: Any) -> list[Any]:
    """The buckets as they stand; JSON may hold a single one."""
    return list(phase.bs) if isinstance(phase.bs, list | tuple) else [] if phase.bs is None else [phase.bs]


def _listed(rules: tuple[Rule, ...]) -> str:
    return "; and ".join(map(str, rules))


def _asked(server_args: Any) -> dict[str, Any]:
    """The user's own settings of prefill graphs, as SGLang ranks them: JSON over flags."""
    flags = {
        "backend": server_args.cuda_graph_backend_prefill,
        "bs": server_args.cuda_graph_bs_prefill,
        "max_bs": server_args.cuda_graph_max_bs_prefill,
    }
    asked = {name: value for name, value in flags.items() if value is not None}
    if server_args.disable_cuda_graph or server_args.disable_prefill_cuda_graph:
        asked.setdefault("backend", DISABLED)
    config = server_args.cuda_graph_config
    if config is not None and not isinstance(config, dict):
        config = config.to_dict()
    return asked | ((config or {}).get("prefill") or {})
