"""The seam table: every place in SGLang this plugin touches or reads, and the check of it.

Contract: this module alone knows SGLang's dotted names. A row says what is used, how, why, on
which releases it was run, and when it can go. Rows with the same key are variants of one seam:
the first that fits the installed host is used. Releases are named for people; capabilities
decide. Nothing is registered before every seam of an enabled feature fits.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from sglang_bcg_dsa.source import Absent, function_in, given_to_instances, names_in, parameters

_PREFILL = "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
_DP = "sglang.srt.managers.scheduler_components.dp_attn"
_BATCH = "sglang.srt.managers.schedule_batch"
_FORWARD = "sglang.srt.model_executor.forward_batch_info"
_BCG = "sglang.srt.model_executor.runner_backend_utils.breakable_cuda_graph"
_CONTEXT = "sglang.srt.model_executor.runner_backend_utils.tc_piecewise_cuda_graph.context_manager"
_MOE = "sglang.srt.layers.moe.ep_moe.layer"
_ATTENTION = "sglang.srt.layers.attention"
_DSV4 = f"{_ATTENTION}.deepseek_v4_backend"
_POOL = "sglang.srt.mem_cache.deepseek_v4_memory_pool:DeepSeekV4TokenToKVPool"
_DSV4_MODEL = "sglang.srt.models.deepseek_v4"
_MLA = "sglang.srt.models.deepseek_common.attention_forward_methods.forward_mla:DeepseekMLAForwardMixin"
_ARGS = "sglang.srt.server_args:ServerArgs"
_GROUPS = "sglang.srt.arg_groups"
_GRAPHS = f"{_GROUPS}.cuda_graph_hook"
_CONFIG = "sglang.srt.model_executor.cuda_graph_config"
_SETUP = "sglang.srt.model_executor.model_runner_components.cuda_graph_setup"
_COLLECTOR = "sglang.srt.observability.metrics_collector:SchedulerMetricsCollector"
_MODEL = "sglang.srt.configs.model_config"
_ALL = "0.5.16, 0.5.23"

_FIELDS = {
    "exec_:ExecGraph": (
        "cuda_graph_config", "cuda_graph_backend_prefill", "cuda_graph_bs_prefill", "cuda_graph_max_bs_prefill",
        "disable_cuda_graph", "disable_prefill_cuda_graph",
    ),
    "exec_:ExecFeatures": ("enable_memory_saver",),
    "exec_:ExecMoe": ("moe_a2a_backend", "deepep_mode"),
    "exec_:ExecOverlap": ("enable_two_batch_overlap", "enable_single_batch_overlap"),
    "parallel:Parallel": ("tp_size", "pp_size", "dcp_size", "attn_cp_size", "enable_prefill_cp"),
    "lora:Lora": ("enable_lora", "lora_paths"),
    "schedule:Schedule": ("max_total_tokens", "mem_fraction_static"),
    "disagg:Disagg": ("disaggregation_mode",),
    "device:Device": ("device",),
    "spec:Spec": ("speculative_algorithm",),
}  # fmt: skip
"""Arguments the rules read, by the class that declares them from 0.5.20 on; before, ServerArgs does."""


class Kind(enum.Enum):
    """How a seam is used, and so what has to fit."""

    HOOK = "hook"
    """Wrapped through HookRegistry: leading parameters must have these names, in this order."""
    CALL = "call"
    """Called or subclassed by us: these parameter names must be accepted."""
    ATTRIBUTE = "attribute"
    """A field, property, method or ``self`` attribute that instances of the class have."""
    VALUE = "value"
    """A name in a module."""


@dataclasses.dataclass(frozen=True)
class Seam:
    """One row. ``path`` is ``module:qualified.name``; ``params`` as ``kind`` says."""

    key: str
    feature: str
    kind: Kind
    path: str
    why: str
    remove_when: str
    params: tuple[str, ...] = ()
    hosts: str = _ALL
    optional: bool = False
    unless: str = ""
    """Key of a seam whose presence makes this one needless."""

    @property
    def module(self) -> str:
        """The module part of the path."""
        return self.path.partition(":")[0]

    @property
    def name(self) -> str:
        """The qualified name inside the module."""
        return self.path.partition(":")[2]

    @property
    def target(self) -> str:
        """The dotted path as HookRegistry wants it."""
        return self.path.replace(":", ".")


@dataclasses.dataclass(frozen=True)
class Mismatch:
    """A seam that does not fit: every variant that was tried, and what was found instead."""

    key: str
    feature: str
    tried: tuple[tuple[Seam, str], ...]

    def __str__(self) -> str:
        return "; or ".join(f"{seam.path}: {found}" for seam, found in self.tried)


def _rows(feature: str, remove_when: str, *rows: tuple[Any, ...], unless: str = "") -> list[Seam]:
    """Rows of one feature that go for the same reason: (key, kind, path, why[, params[, hosts[, optional]]])."""
    return [
        dataclasses.replace(Seam(key, feature, kind, path, why, remove_when, *rest), unless=unless)
        for key, kind, path, why, *rest in rows
    ]


_NO_REASONS = "SGLang's vote carries reasons and its forward-time check reports them"
_NO_COUNTS = "SGLang reports coverage, reasons and buckets of prefill graphs"
_NO_AUDIT = "SGLang compares its ranks' configuration and stops on a contradicted verdict"
_NO_DSA = "SGLang keeps what its graphs read and captures DSA attention itself"
_NO_DSV4 = "SGLang's DSV4 graphs hold no scores and no tables of the full context"
_RUNNER = f"{_PREFILL}:PrefillCudaGraphRunner"

SEAMS: tuple[Seam, ...] = (
    *_rows(
        "flag",
        "SGLang has a --plugins flag of its own",
        ("flag.declare", Kind.HOOK, "sglang.srt.server_args:ServerArgs.add_cli_args",
         "adds --plugins and --bcg-dsa-config to the command line and to --config files", ("parser",)),
        ("flag.take", Kind.HOOK, "sglang.srt.server_args:ServerArgs.from_cli_args",
         "acts on the flags before SGLang resolves its arguments", ("cls", "args")),
    ),
    *_rows(
        "vote",
        _NO_REASONS,
        ("vote.batch", Kind.HOOK, f"{_DP}:SchedulerDPAttnAdapter.prepare_mlp_sync_batch",
         "the batch this rank is about to vote on", ("self", "local_batch")),
        ("vote.gather", Kind.HOOK, f"{_DP}:MLPSyncBatchInfo.all_gather",
         "this rank's vote goes out and all ranks' votes come back", ("self", "device", "group")),
        ("vote.row", Kind.CALL, f"{_DP}:MLPSyncBatchInfo._get_local_tensor",
         "the order of the gathered columns is probed once with marked values", ("self", "device")),
        ("vote.ballot", Kind.ATTRIBUTE, f"{_DP}:MLPSyncBatchInfo.can_run_prefill_cuda_graph",
         "this rank's yes or no, and the host's own reduction of all", (), "0.5.23"),
        ("vote.ballot", Kind.ATTRIBUTE, f"{_DP}:MLPSyncBatchInfo.can_run_breakable_cuda_graph",
         "this rank's yes or no, and the host's own reduction of all", (), "0.5.16"),
        ("vote.prefill", Kind.ATTRIBUTE, f"{_DP}:MLPSyncBatchInfo.is_extend_in_batch",
         "the column in which the reasons ride: the host only asks whether any is not zero"),
        ("vote.tokens", Kind.ATTRIBUTE, f"{_DP}:MLPSyncBatchInfo.num_tokens", "tokens of this rank"),
        ("vote.rows", Kind.ATTRIBUTE, f"{_DP}:MLPSyncBatchInfo.tp0_info_cpu",
         "the gathered rows of all DP ranks", (), "0.5.23"),
        ("vote.rows", Kind.ATTRIBUTE, f"{_DP}:MLPSyncBatchInfo.tp0_info",
         "the gathered rows of all DP ranks", (), "0.5.16"),
        *(
            (f"vote.fact.{name}", Kind.ATTRIBUTE, f"{_BATCH}:ScheduleBatch.{name}", "a fact of the predicate")
            for name in ("forward_mode", "input_embeds", "replace_embeds", "prefix_lens", "return_logprob",
                         "return_hidden_states", "seq_lens_cpu", "multimodal_inputs", "batch_size")
        ),
        ("forward.decide", Kind.HOOK, f"{_RUNNER}.can_run_graph",
         "the forward-time check, an adapter over the same predicate as the vote", ("self", "forward_batch")),
        ("forward.verdict", Kind.ATTRIBUTE, f"{_FORWARD}:ForwardBatch.can_run_dp_prefill_cuda_graph",
         "the group's verdict as the host carries it to the forward", (), "0.5.23"),
        ("forward.verdict", Kind.ATTRIBUTE, f"{_FORWARD}:ForwardBatch.can_run_dp_breakable_cuda_graph",
         "the group's verdict as the host carries it to the forward", (), "0.5.16"),
        *(
            (f"forward.fact.{name}", Kind.ATTRIBUTE, f"{_FORWARD}:ForwardBatch.{name}", "a fact of the predicate")
            for name in ("forward_mode", "input_ids", "input_embeds", "replace_embeds", "extend_prefix_lens_cpu",
                         "capture_hidden_mode", "return_logprob", "global_num_tokens_cpu", "batch_size",
                         "seq_lens_cpu", "contains_mm_inputs", "dp_padding_mode")
        ),
        ("runner.init", Kind.HOOK, f"{_RUNNER}.__init__",
         "what this rank's graphs can serve, read once after capture; draft runners are passed over",
         ("self", "model_runner")),
        *(
            (f"runner.fact.{name}", Kind.ATTRIBUTE, f"{_RUNNER}.{name}", "a fact of the captured graphs")
            for name in ("capture_num_tokens", "capture_hidden_mode", "has_mha_companion_layers",
                         "prefill_backend_name", "model_runner")
        ),
        ("runner.local", Kind.CALL, f"{_RUNNER}.can_replay_locally",
         "the host's own rank-local predicate: probed once, so that ours names what it refuses",
         ("batch_size", "num_tokens", "prefix_lens", "return_logprob"), "0.5.23", True),
        *(
            (f"runner.limit.{name}", Kind.ATTRIBUTE, f"{_RUNNER}.{name}", "a limit of the captured graphs", (), "0.5.23", True)
            for name in ("max_context_size", "max_seq_len", "_captured_attn_metadata_max_bs", "enable_lora")
        ),
        *(
            (f"model.{name}", Kind.ATTRIBUTE, f"sglang.srt.model_executor.model_runner:ModelRunner.{name}",
             "draft models do not vote, and speculation sets the hidden mode after the vote")
            for name in ("is_draft_worker", "spec_algorithm")
        ),
        ("runner.fact.require_mlp_tp_gather", Kind.ATTRIBUTE, f"{_RUNNER}.require_mlp_tp_gather",
         "whether all ranks of a group pad to the largest"),
        ("runner.inactive", Kind.CALL, f"{_RUNNER}._has_inactive_dp_rank",
         "whether a rank of the group stays out of this forward", ("forward_batch",)),
        ("runner.padding", Kind.VALUE, f"{_PREFILL}:_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR",
         "the largest padding the host accepts"),
    ),
    *_rows(
        "explain",
        _NO_COUNTS,
        ("forward.eager", Kind.HOOK, "sglang.srt.model_executor.runner.eager_runner:EagerRunner.execute",
         "counts eager prefills, also where there is no graph runner to ask", ("self", "forward_batch")),
        ("runner.capture_one", Kind.HOOK, f"{_RUNNER}.capture_one_shape", "capture seconds of each bucket",
         ("self", "size")),
        ("scheduler.state", Kind.HOOK, "sglang.srt.managers.scheduler:Scheduler.get_internal_state",
         "publishes the counters under /server_info", ("self", "recv_req")),
        ("scheduler.metrics", Kind.HOOK, f"{_COLLECTOR}.init_new",
         "the counters join SGLang's own under /metrics, in the processes that publish", ("cls", "server_args")),
        *(
            (f"scheduler.metrics.{name}", Kind.ATTRIBUTE, f"{owner}.{name}", "which process publishes, with which labels")
            for owner, name in ((f"{_COLLECTOR}Context", "current_scheduler_metrics_enabled"),
                                (f"{_COLLECTOR}Context", "collector"), (_COLLECTOR, "labels"))
        ),
    ),
    *_rows(
        "audit",
        _NO_AUDIT,
        ("runner.capture", Kind.HOOK, f"{_RUNNER}.capture",
         "ranks compare features and ladder here: all have just left a barrier, none has captured", ("self",)),
        ("scheduler.ready", Kind.HOOK, "sglang.srt.managers.scheduler:Scheduler.init_dp_attn_adapter",
         "the last step of start-up: every hook is verified here, and ranks without graphs compare", ("self",)),
        ("scheduler.receive", Kind.HOOK,
         "sglang.srt.managers.scheduler_components.request_receiver:SchedulerRequestReceiver.recv_requests",
         "requests are broadcast: ranks wait here for one that is stopped before it votes", ("self",)),
        ("scheduler.run", Kind.HOOK, "sglang.srt.managers.scheduler:Scheduler.run_batch",
         "a forward begins and ends: the watchdog limits it", ("self", "batch")),
        ("scheduler.results", Kind.HOOK, "sglang.srt.managers.scheduler:Scheduler.process_batch_result",
         "with overlap a forward that hangs on the device is waited for here", ("self", "batch", "result")),
        ("audit.replay", Kind.CALL, f"{_BCG}.breakable_cuda_graph:BreakableCUDAGraph.replay",
         "its place is read from its stack in a stall report", ("self",)),
        *(
            (f"audit.{name}", Kind.ATTRIBUTE, f"{_BCG}.breakable_cuda_graph:BreakableCUDAGraph.{name}",
             "segments and breaks are counted, and a break named, in a stall report")
            for name in ("_segments", "_break_fns")
        ),
        ("audit.collectives", Kind.VALUE, "sglang.srt.distributed.parallel_state:GroupCoordinator",
         "a rank in one of its methods is in a collective, says a stall report"),
    ),
    *_rows(
        "attention",
        _NO_DSA,
        ("attention.native", Kind.CALL, f"{_RUNNER}.can_replay_locally",
         "the host accepts prefixes and keeps what its graphs read; its DSA path is then left alone",
         ("prefix_lens",), "0.5.23", True),
    ),
    *_rows(
        "attention",
        _NO_DSA,
        ("attention.register", Kind.CALL, f"{_ATTENTION}.attention_registry:register_attention_backend",
         "the DSA backend and its old name are registered anew", ("name",)),
        ("attention.dsa", Kind.VALUE, f"{_ATTENTION}.dsa_backend:DeepseekSparseAttnBackend", "the backend we subclass"),
        ("attention.metadata", Kind.VALUE, f"{_ATTENTION}.dsa_backend:DSAMetadata", "its fields have declared policies"),
        ("attention.built", Kind.HOOK, f"{_RUNNER}.__init__", "the registry's choice is verified",
         ("self", "model_runner")),
        ("attention.kept", Kind.HOOK, f"{_RUNNER}.capture_prepare",
         "tensors of a captured batch are kept as long as the graphs", ("self", "num_tokens")),
        ("attention.load", Kind.HOOK, f"{_RUNNER}.load_batch",
         "the count of real tokens is made local to the attention-TP rank", ("self", "forward_batch")),
        *(
            (f"attention.{name}", Kind.ATTRIBUTE, f"{_FORWARD}:ForwardBatch.{name}", "real tokens of a batch")
            for name in ("num_token_non_padded_cpu", "_original_forward_mode")
        ),
        ("attention.indexer", Kind.VALUE, f"{_ATTENTION}.dsa.dsa_indexer:bcg_dsa_indexer_prefill_split",
         "the indexer's break, wrapped: all but its selection goes into the segment"),
        *(
            (f"attention.indexer.{name}", Kind.CALL, f"{_ATTENTION}.dsa.dsa_indexer:Indexer.{name}", why, params)
            for name, why, params in (
                ("_fused_q_prepare_and_store", "projects and stores in the segment",
                 ("x", "q_lora", "positions", "forward_batch", "layer_id", "act_quant", "enable_dual_stream")),
                ("_get_q_k_bf16", "projects, where the host does not fuse",
                 ("q_lora", "x", "positions", "enable_dual_stream", "forward_batch")),
                ("_store_index_k_cache", "stores keys, where the host does not fuse",
                 ("forward_batch", "layer_id", "key", "act_quant")),
                ("_get_logits_head_gate", "head weights, where the host does not fuse", ()),
                ("_should_skip_logits_computation", "whether every context is within the top k", ("forward_batch",)),
                ("_get_topk_ragged", "scores and selects in the break",
                 ("forward_batch", "layer_id", "q_fp8", "weights", "metadata", "topk_result")),
            )
        ),
        ("attention.quantise", Kind.CALL, "sglang.kernels.ops.attention.dsa.triton_kernel:act_quant",
         "handed to the indexer's own methods", ()),
        ("attention.core", Kind.HOOK, f"{_MLA}.forward_absorb_core", "attention over the selected slots is captured",
         ("self",)),
        ("attention.fuse", Kind.HOOK, f"{_MLA}._can_fuse_bmm_into_attention",
         "a matrix product leaves the attention break with it", ("self", "forward_batch")),
        ("attention.inline", Kind.CALL, "sglang.srt.layers.radix_attention:force_eager_attention",
         "the host's own way to call attention without a break"),
        ("attention.context", Kind.CALL, f"{_CONTEXT}:get_tc_piecewise_forward_context",
         "the live batch of a break"),
        ("attention.backend", Kind.CALL, "sglang.srt.model_executor.forward_context:get_attn_backend",
         "the attention backend of the running forward"),
        ("attention.arguments", Kind.CALL, "sglang.srt.runtime_context:get_server_args",
         "whether a cache is waited for in Python, layer by layer"),
        *(
            (f"attention.arg.{name}", Kind.ATTRIBUTE, f"{_ARGS}.{name}", "a cache that is waited for layer by layer")
            for name in ("enable_hierarchical_cache", "enable_flexkv", "enable_lmcache", "radix_cache_backend")
        ),
        ("attention.waits", Kind.ATTRIBUTE, "sglang.srt.mem_cache.memory_pool:KVCache.layer_transfer_counter",
         "set where a cache is waited for layer by layer: refused once attention is captured"),
        ("attention.gathers", Kind.ATTRIBUTE, f"{_RUNNER}.require_attn_tp_gather",
         "whether rows are split over attention-TP ranks"),
        unless="attention.native",
    ),
    *_rows(
        "dsv4",
        _NO_DSV4,
        ("dsv4.register", Kind.CALL, f"{_ATTENTION}.attention_registry:register_attention_backend",
         "the DSV4 backend is registered anew", ("name",)),
        ("dsv4.create", Kind.CALL, f"{_ATTENTION}.attention_registry:create_dsv4_backend",
         "the host's own choice of a backend, kept where it is not the one we subclass", ("runner",)),
        ("dsv4.backend", Kind.VALUE, f"{_DSV4}:DeepseekV4AttnBackend", "the backend we subclass"),
        ("dsv4.built", Kind.HOOK, f"{_RUNNER}.__init__", "the registry's choice is verified", ("self", "model_runner")),
        *(
            (f"dsv4.{name}", Kind.VALUE, path, "its fields have declared policies")
            for name, path in (("metadata", f"{_DSV4}:DSV4Metadata"), ("core", f"{_DSV4}:DSV4AttnMetadata"),
                               ("plan", f"{_ATTENTION}.dsv4.compressor_v2:CompressorPrefillPlan"))
        ),
        ("dsv4.schedule", Kind.CALL, f"{_DSV4}:_create_flashmla_metadata", "a schedule that attention fills on its first layer"),
        ("dsv4.online", Kind.CALL, f"{_ATTENTION}.dsv4.compressor_v2:_use_online_compress",
         "whether C128 is planned on the host", ("compress_ratio",)),
        *(
            (f"dsv4.{name}", Kind.CALL, f"{owner}.{name}", why, params)
            for owner, name, why, params in (
                (f"{_DSV4}:DeepseekV4AttnBackend", "init_forward_metadata_for_breakable_cuda_graph_capture",
                 "builds what a graph captures", ("forward_batch",)),
                (f"{_DSV4}:DeepseekV4AttnBackend", "prepare_forward_metadata_for_breakable_cuda_graph_replay",
                 "refreshes it for a live batch", ("capture_metadata", "forward_batch", "static_forward_batch")),
                (f"{_DSV4}:DeepseekV4AttnBackend", "_build_forward_metadata", "builds metadata at a given width",
                 ("forward_batch", "max_seq_len_override", "use_prefill_cuda_graph")),
                (f"{_DSV4}:DeepseekV4AttnBackend", "init_forward_metadata_prefill", "one kernel writes it instead",
                 ("max_seq_len", "req_pool_indices", "seq_lens", "out_cache_loc", "num_tokens", "extend_seq_lens")),
                (f"{_DSV4}:DeepseekV4AttnBackend", "make_core_attn_metadata",
                 "tables of the breaks are cut to the real rows", ("req_pool_indices_repeated", "seq_lens_casual", "out_loc")),
                (f"{_DSV4}:DeepseekV4AttnBackend", "init_forward_metadata_indexer",
                 "the selection's schedules are made for the real rows", ("core_attn_metadata", "use_prefill_cuda_graph")),
                (f"{_ATTENTION}.dsv4.indexer:C4IndexerBackendMixin", "forward_c4_indexer",
                 "projects in the segment, scores and selects in the break",
                 ("x", "q_lora", "c4_indexer", "forward_batch", "alt_streams", "enable_multi_stream", "q_lora_ready",
                  "skip_compressor")),
                (f"{_ATTENTION}.dsv4.indexer:C4IndexerBackendMixin", "_forward_prepare_normal",
                 "the projection; in the break it gives what the segment projected",
                 ("x", "q_lora", "c4_indexer", "positions", "forward_batch", "skip_compressor")),
                (f"{_ATTENTION}.dsv4.indexer:C4IndexerBackendMixin", "_forward_prepare_multi_stream",
                 "the same projection, on side streams",
                 ("x", "q_lora", "c4_indexer", "positions", "forward_batch", "alt_streams", "q_lora_ready")),
                (f"{_ATTENTION}.dsv4.compressor_v2:CompressorBackendMixin", "forward_unified",
                 "compresses in the break what is planned on the host",
                 ("x", "forward_batch", "layer_id", "compressor")),
            )
        ),
        ("dsv4.compress", Kind.ATTRIBUTE, f"{_DSV4}:DeepseekV4AttnBackend.forward_core_compressor",
         "compresses in the break what is planned on the host"),
        ("dsv4.attend", Kind.VALUE, f"{_DSV4_MODEL}:bcg_deepseek_v4_attention_with_output",
         "a layer's break, wrapped: it also selects, and defines the rows below the real ones"),
        ("dsv4.body", Kind.CALL, f"{_DSV4_MODEL}:deepseek_v4_attention_with_output", "the attention inside that break",
         ("query", "key_value", "output", "layer_id", "compress_ratio", "attn_sink", "save_kv_cache")),
        ("dsv4.real_tokens", Kind.ATTRIBUTE, f"{_FORWARD}:ForwardBatch.global_num_token_non_padded_cpu",
         "real tokens of a batch", (), "0.5.23"),
        ("dsv4.real_tokens", Kind.ATTRIBUTE, f"{_FORWARD}:ForwardBatch.num_token_non_padded_cpu",
         "real tokens of a batch", (), "0.5.16"),
        ("dsv4.context", Kind.CALL, f"{_CONTEXT}:get_tc_piecewise_forward_context",
         "the live batch of a break"),
        ("dsv4.current", Kind.CALL, "sglang.srt.model_executor.forward_context:get_attn_backend",
         "the attention backend of the running forward"),
        *(
            (f"dsv4.pool.{name}", Kind.ATTRIBUTE, f"{_POOL}.{name}", why)
            for name, why in (
                ("full_to_swa_index_mapping", "the window's slots, for the kernel that writes tables"),
                ("swa_page_size", "how the window's slots are paged, for that kernel"),
                ("get_ring_size", "how many states a compressor keeps, for that kernel"),
                ("translate_loc_from_full_to_swa", "the window's targets, once a forward instead of once a layer"),
                ("wait_layer_transfer", "a cache that is filled layer by layer is waited for before a replay"),
            )
        ),
        *(
            (f"dsv4.pool.{name}", Kind.ATTRIBUTE, f"sglang.srt.mem_cache.memory_pool:KVCache.{name}",
             "which layers of a cache are waited for")
            for name in ("layer_transfer_counter", "start_layer", "layer_num")
        ),
        ("dsv4.narrow", Kind.ATTRIBUTE, f"{_DSV4}:DeepseekV4AttnBackend._prefill_graph_context_width",
         "the host's graphs of a draft model keep tables of the live width only", (), "0.5.23", True),
        ("dsv4.budget", Kind.HOOK, f"{_ATTENTION}.dsv4.metadata:PagedIndexerMetadata._mqa_logits_budget",
         "scores are made in chunks of rows in a break too", ("self",), "0.5.23", True),
        ("dsv4.budget.asked", Kind.CALL, f"{_ATTENTION}.mqa_logits_utils:mqa_logits_needs_budget_check",
         "whether so many scores need a budget", ("num_rows", "num_cols"), "0.5.23", True),
        ("dsv4.budget.bytes", Kind.CALL, f"{_ATTENTION}.mqa_logits_utils:mqa_logits_static_budget_bytes",
         "the budget, without asking the device", ("device_index",), "0.5.23", True),
    ),
    *_rows(
        "moe",
        "hosts without a DeepEP break of their own (before 0.5.17) are no longer supported",
        ("moe.native", Kind.ATTRIBUTE, f"{_MOE}:DeepEPMoE.a2a_forward_with_output",
         "the host has a break of its own, which is then kept", (), "0.5.23", True),
        ("moe.choose", Kind.HOOK, f"{_MOE}:get_moe_impl_class", "models ask here which MoE class to build",
         ("quant_config",)),
        ("moe.impl", Kind.CALL, f"{_MOE}:DeepEPMoE.forward_impl", "dispatch, experts and combine, run by the break",
         ("hidden_states", "topk_output")),
        ("moe.shared", Kind.HOOK, "sglang.srt.models.deepseek_v2:DeepseekV2MoE.forward_deepep",
         "its alternate stream must not fork across the break", ("self", "hidden_states")),
        ("moe.topk", Kind.VALUE, "sglang.srt.layers.moe.topk:StandardTopKOutput", "rebuilt inside the break"),
        ("moe.get_mode", Kind.CALL, "sglang.srt.layers.dp_attention:get_is_extend_in_batch",
         "DeepEP's mode follows it; restored after the break"),
        ("moe.set_mode", Kind.CALL, "sglang.srt.layers.dp_attention:set_is_extend_in_batch",
         "the break runs NORMAL", ("is_extend_in_batch",)),
        ("moe.overlap", Kind.CALL, "sglang.srt.layers.moe.utils:is_sbo_enabled",
         "single-batch overlap is refused with captured breaks: its hooks would not run"),
        ("moe.recorder", Kind.CALL, "sglang.srt.eplb.expert_distribution:get_global_expert_distribution_recorder",
         "told the layer at replay, when the Python that tells it does not run"),
        ("moe.recorder.off", Kind.ATTRIBUTE, "sglang.srt.eplb.expert_distribution:_ExpertDistributionRecorderReal._disable_all",
         "draft models are not recorded, neither at replay"),
        ("moe.dispatcher", Kind.HOOK, "sglang.srt.batch_overlap.two_batch_overlap:MaybeTboDeepEPDispatcher._execute",
         "every dispatch and combine passes here: refused while a segment is captured", ("self", "name")),
        ("moe.args", Kind.CALL, "sglang.srt.runtime_context:get_server_args",
         "whether experts are rebalanced in a way that captured graphs do not see"),
        *(
            (f"moe.args.{name}", Kind.ATTRIBUTE, f"sglang.srt.server_args:ServerArgs.{name}",
             "rebalancing that would leave captured graphs behind", (), "0.5.16", True)
            for name in ("enable_eplb", "ep_dispatch_algorithm", "elastic_ep_backend")
        ),
        ("moe.group", Kind.CALL, "sglang.srt.distributed.parallel_state:get_tp_group",
         "the ranks that meet before the break while capturing"),
    ),
    *_rows(
        "bench",
        "SGLang times prefill graphs against eager itself",
        ("bench.build", Kind.CALL, "sglang.benchmark.one_batch:extend", "builds a prefill batch as a scheduler does",
         ("reqs", "model_runner")),
        ("bench.requests", Kind.CALL, "sglang.benchmark.one_batch:prepare_synthetic_inputs_for_latency_test",
         "requests of given tokens", ("batch_size", "input_len", "custom_inputs")),
        ("bench.load", Kind.CALL, "sglang.benchmark.one_batch:load_model", "a model runner without a scheduler",
         ("server_args", "port_args", "gpu_id", "tp_rank")),
        ("bench.replay", Kind.HOOK, f"{_BCG}.breakable_cuda_graph:BreakableCUDAGraph.replay",
         "the parts of a replay are timed", ("self",)),
    ),
    *_rows(
        "rules",
        "SGLang's own rules fit these models, name their cause, and hold for a backend that the user chose",
        ("rules.resolve", Kind.HOOK, f"{_GROUPS}.pipeline:run_resolution_pipeline",
         "the whole resolution: what it left is settled, checked and reported", ("server_args",), "0.5.23"),
        ("rules.resolve", Kind.HOOK, f"{_ARGS}.__post_init__",
         "the whole resolution: what it left is settled, checked and reported", ("self",), "0.5.16"),
        ("rules.judge", Kind.HOOK, f"{_GRAPHS}:disable_breakable_cudagraph_if_incompatible",
         "the host's rules for breakable graphs by default", ("server_args",), "0.5.23"),
        ("rules.judge", Kind.HOOK, f"{_ARGS}._disable_breakable_cudagraph_if_incompatible",
         "the host's rules for breakable graphs by default", ("self",), "0.5.16"),
        ("rules.a2a", Kind.HOOK, f"{_GROUPS}.moe_hook:handle_a2a_moe",
         "switches prefill graphs off for DeepEP's normal mode, in which the break runs anyway",
         ("server_args",), "0.5.23"),
        ("rules.a2a", Kind.HOOK, f"{_ARGS}._handle_a2a_moe",
         "switches prefill graphs off for DeepEP's normal mode, in which the break runs anyway", ("self",), "0.5.16"),
        ("rules.align", Kind.HOOK, f"{_GRAPHS}:apply_deepep_adjustments",
         "aligns buckets too early, and caps the ladder by accident: done at the end instead",
         ("server_args",), "0.5.23", True),
        ("rules.align", Kind.HOOK, f"{_ARGS}._apply_deepep_adjustments",
         "aligns buckets too early: done at the end instead", ("self",), "0.5.17", True),
        ("rules.reserve", Kind.HOOK, f"{_GROUPS}.memory_hook:reserve_for_graph_mb",
         "memory set aside for graphs, to which DSV4's are added", ("server_args",), "0.5.23", True),
        ("rules.capacity", Kind.CALL, "sglang.srt.utils.common:get_device_memory_capacity",
         "memory of a device, which DSV4's graphs have to fit in", ("device",)),
        ("rules.reserve", Kind.HOOK, f"{_ARGS}.reserve_for_graph_mb",
         "memory set aside for graphs, to which DeepEP's break is added", ("self",), "0.5.16", True),
        ("rules.memory", Kind.HOOK, f"{_SETUP}:should_skip_auto_prefill_cuda_graph_for_memory",
         "whether this rank has too little memory to capture: all ranks must decide alike",
         ("available_memory_gb", "cuda_graph_config_locked"), "0.5.16", True),
        ("rules.view", Kind.CALL, f"{_GROUPS}.model_override_base:resolved_view",
         "arguments as resolved so far", ("server_args",), "0.5.23"),
        ("rules.view", Kind.CALL, f"{_GROUPS}.overrides:resolved_view",
         "arguments as resolved so far", ("server_args",), "0.5.16"),
        ("rules.declare", Kind.HOOK, f"{_GROUPS}.overrides:declare_resolution",
         "the one way to write a resolved argument, and who switched graphs off",
         ("server_args", "source"), "0.5.23", True),
        ("rules.with_phase", Kind.CALL, f"{_CONFIG}:with_phase",
         "a graph configuration with one phase changed", ("config", "phase"), "0.5.23", True),
        *(
            (f"rules.phase.{name}", Kind.ATTRIBUTE, f"{_CONFIG}:PhaseConfig.{name}", "what is decided about prefill graphs")
            for name in ("backend", "bs", "max_bs")
        ),
        *(
            (f"rules.arg.{name}", Kind.ATTRIBUTE, f"{_GROUPS}.fields.{owner}.{name}", "a fact of the rules", (), "0.5.23")
            for owner, names in _FIELDS.items()
            for name in names
        ),
        *(
            (f"rules.arg.{name}", Kind.ATTRIBUTE, f"{_ARGS}.{name}", "a fact of the rules", (), "0.5.16")
            for names in _FIELDS.values()
            for name in names
        ),
        *(
            (f"rules.arg.{name}", Kind.ATTRIBUTE, f"{_ARGS}.{name}", "a fact of the rules", (), "0.5.16", True)
            for name in ("enable_eplb", "ep_dispatch_algorithm", "elastic_ep_backend", "kv_cache_dtype", "dsa_prefill_backend")
        ),
        ("rules.arg.dsv4_attn_backend", Kind.ATTRIBUTE, f"{_GROUPS}.fields.exec_:ExecKernel.dsv4_attn_backend",
         "whether DeepSeek-V4 has the attention backend that we subclass", (), "0.5.23", True),
        ("rules.attention_dp", Kind.ATTRIBUTE, f"{_GROUPS}.fields.parallel:Parallel.attn_dp_size",
         "how many DP attention ranks", (), "0.5.23", True),
        ("rules.dp", Kind.ATTRIBUTE, f"{_ARGS}.dp_size", "DP attention ranks, if it is enabled", (), "0.5.16", True),
        ("rules.dp_attention", Kind.ATTRIBUTE, f"{_ARGS}.enable_dp_attention",
         "whether DP ranks share the model", (), "0.5.16", True),
        ("rules.model", Kind.CALL, f"{_GROUPS}.model_override_base:model_config_of",
         "the model's configuration", ("server_args",), "0.5.23"),
        ("rules.model", Kind.CALL, f"{_ARGS}.get_model_config", "the model's configuration", (), "0.5.16"),
        ("rules.is_dsa", Kind.CALL, f"{_MODEL}:is_deepseek_dsa", "whether the rules speak for the model", ("config",)),
        ("rules.is_dsv4", Kind.CALL, f"{_MODEL}:is_deepseek_v4", "whether the model has the DSV4 attention backend", ("config",)),
        ("rules.architectures", Kind.VALUE, f"{_MODEL}:AttentionArch", "whether the model has latent attention"),
        *(
            (f"rules.model.{name}", Kind.ATTRIBUTE, f"{_MODEL}:ModelConfig.{name}", "a fact of the rules")
            for name in ("hf_config", "attention_arch", "is_multimodal", "context_len", "hidden_size",
                         "is_multimodal_breakable_cuda_graph_supported")
        ),
        ("rules.cp", Kind.CALL, "sglang.srt.layers.cp.bcg:supports_prefill_cp_bcg",
         "whether the host's graphs support this split of prefills", ("server_args",), "0.5.23", True),
        ("rules.pipeline", Kind.ATTRIBUTE, f"{_RUNNER}._capture_pp_proxy_tensors",
         "the host captures with the tensors of the stage before", (), "0.5.23", True),
    ),
    *_rows(
        "parallel",
        "SGLang's rows carry their rank and its padding is part of the vote",
        ("parallel", Kind.CALL, "sglang.srt.runtime_context:get_parallel",
         "this process's ranks, and the attention-TP size to which token counts are aligned"),
    ),
    *_rows(
        "engine",
        "SGLang's break decorator takes a capture stub, a barrier and owned inputs on every host",
        ("engine.current", Kind.VALUE, f"{_BCG}.breakable_cuda_graph:_current_capture_var",
         "the capture in progress on this thread"),
        ("engine.segment", Kind.ATTRIBUTE, f"{_BCG}.breakable_cuda_graph:BreakableCUDAGraphCapture._current_graph",
         "whether a segment of it is open: not inside a break"),
        ("engine.end", Kind.CALL, f"{_BCG}.breakable_cuda_graph:BreakableCUDAGraphCapture._end_current_segment",
         "ends the segment before a break"),
        ("engine.begin", Kind.CALL, f"{_BCG}.breakable_cuda_graph:BreakableCUDAGraphCapture._begin_new_segment",
         "begins the segment after a break"),
        ("engine.graph", Kind.ATTRIBUTE, f"{_BCG}.breakable_cuda_graph:BreakableCUDAGraphCapture.cuda_graph",
         "the graph that takes the break"),
        ("engine.breaks", Kind.ATTRIBUTE, f"{_BCG}.breakable_cuda_graph:BreakableCUDAGraph._break_fns",
         "the list of breaks, in order"),
        ("engine.host_break", Kind.CALL, f"{_BCG}.breakable_cuda_graph:eager_on_graph", "the host's own kind of break",
         ("enable",)),
        ("engine.region", Kind.CALL, f"{_BCG}.context:is_in_breakable_cuda_graph",
         "whether the running forward is warmed up, captured or replayed as a breakable graph"),
    ),
)


class SeamSet:
    """The seams of one installed host: which variant fits each key, and what does not fit."""

    def __init__(self, fitting: dict[str, Seam], mismatches: Sequence[Mismatch]) -> None:
        self._fitting = fitting
        self.mismatches = tuple(mismatches)

    def __contains__(self, key: str) -> bool:
        return key in self._fitting

    def __getitem__(self, key: str) -> Seam:
        return self._fitting[key]

    def of(self, feature: str) -> tuple[Seam, ...]:
        """The fitting seams of one feature."""
        return tuple(s for s in self._fitting.values() if s.feature == feature)

    def missing(self, features: Iterable[str]) -> tuple[Mismatch, ...]:
        """The mismatches that stop any of these features."""
        wanted = set(features)
        return tuple(m for m in self.mismatches if m.feature in wanted)

    def field(self, key: str) -> str:
        """The attribute name that an ATTRIBUTE seam has on this host."""
        return self._fitting[key].path.rpartition(".")[2]


def examine(table: Sequence[Seam] = SEAMS) -> SeamSet:
    """Check every row against the installed host's source. Imports and changes nothing."""
    fitting: dict[str, Seam] = {}
    tried: dict[str, list[tuple[Seam, str]]] = {}
    for seam in table:
        if seam.key in fitting:
            continue
        try:
            _fit(seam)
        except Absent as found:
            tried.setdefault(seam.key, []).append((seam, str(found)))
        else:
            fitting[seam.key] = seam
    mismatches = [
        Mismatch(key, attempts[0][0].feature, tuple(attempts))
        for key, attempts in tried.items()
        if key not in fitting and not all(seam.optional or seam.unless in fitting for seam, _ in attempts)
    ]
    return SeamSet(fitting, mismatches)


def resolve(seam: Seam) -> Any:
    """The object a seam names now, wrappers included. Imports the host's module."""
    return getattr(resolve_owner(seam), seam.name.rpartition(".")[2])


def resolve_owner(seam: Seam) -> Any:
    """The class or module that holds what a seam names. Imports the host's module."""
    found: Any = importlib.import_module(seam.module)
    for name in seam.name.split(".")[:-1]:
        found = getattr(found, name)
    return found


def _fit(seam: Seam) -> None:
    """Raise Absent, saying what is there instead, unless the seam fits."""
    owner, _, last = seam.name.rpartition(".")
    if seam.kind is Kind.VALUE:
        if last not in names_in(seam.module):
            raise Absent(f"no {last} in {seam.module}")
        return
    if seam.kind is Kind.ATTRIBUTE:
        if last not in given_to_instances(seam.module, owner):
            raise Absent(f"{owner} has no {last}")
        return
    found = parameters(function_in(seam.module, seam.name))
    fits = found[: len(seam.params)] == seam.params if seam.kind is Kind.HOOK else set(seam.params) <= set(found)
    if not fits:
        raise Absent(f"parameters are ({', '.join(found)}), expected ({', '.join(seam.params)}, ...)")
