"""Which configurations may use prefill graphs, and with which buckets: pure rules over plain facts.

Contract: no host import and no state. A rule says what would go wrong, not what is slow; whoever
asks decides whether a hit switches graphs off or stops the start. Every rule was read in SGLang's
source; only those for DeepEP were seen on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from sglang_bcg_dsa.buckets import Ladder, align_down, align_up, fitted
from sglang_bcg_dsa.errors import StartupError


class RuleError(StartupError):
    """A configuration asks for prefill graphs that would be unsafe, or for buckets that cannot be."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """What the installed SGLang's own prefill graphs can do."""

    own_break: bool = False
    """It has a DeepEP break and a vote with reasons of its own (0.5.17 and later)."""
    pipeline: bool = False
    """Its captured graphs take the tensors of the pipeline stage before."""
    lora: bool = False
    """It votes batches with adapters eager by itself."""

    @property
    def a2a(self) -> tuple[str, ...]:
        """All-to-all backends with prefill graphs that SGLang, or this plugin, has validated."""
        return ("none", "deepep", "megamoe", "flashinfer") if self.own_break else ("none", "deepep")


@dataclass(frozen=True, kw_only=True)
class Arguments:
    """What the rules read of SGLang's arguments, as resolved so far; the defaults hit no rule."""

    host: Host = Host()
    a2a: str = "none"
    deepep_mode: str = "auto"
    attention_dp: int = 1
    """DP attention ranks; 1 without DP attention."""
    context_parallel: bool = False
    """Prefills are split over ranks, in a way that SGLang's graphs do not support."""
    decode_context_parallel: bool = False
    pipeline_parallel: bool = False
    lora: bool = False
    two_batch_overlap: bool = False
    single_batch_overlap: bool = False
    multimodal: bool = False
    """A multimodal model that SGLang does not list as validated."""
    memory_saver: bool = False
    """The memory saver is to manage graph memory too."""
    eplb_lp: bool = False
    """Experts are rebalanced, with linear programming to dispatch by."""
    elastic: bool = False
    """Expert-parallel ranks may join and leave."""
    fp8_kv: bool = False
    """A DSA model's KV cache is quantized."""
    dsa_prefill: str = "flashmla_sparse"
    """A DSA model's prefill implementation."""
    vote: bool = True
    """Feature ``vote`` is active."""
    moe: bool = True
    """Feature ``moe`` is active."""


@dataclass(frozen=True)
class Rule:
    """One reason to keep prefills eager: its name, who causes it, what would go wrong, what to do."""

    name: str
    cause: str
    why: str
    cure: str
    hit: Callable[[Arguments], bool]

    def __str__(self) -> str:
        return f"rule {self.name} ({self.cause}): {self.why}; {self.cure}"


_EAGER = "drop it, or keep prefills eager with `--disable-prefill-cuda-graph`"

RULES: tuple[Rule, ...] = (
    Rule("context_parallel", "`--attn-cp-size`, `--enable-prefill-cp`",
         "the ranks' all-gathers have other sizes at replay than at capture", _EAGER, lambda a: a.context_parallel),
    Rule("decode_context_parallel", "`--dcp-size`", "graphs are captured without its metadata", _EAGER,
         lambda a: a.decode_context_parallel),
    Rule("pipeline_parallel", "`--pp-size`", "captured graphs do not take the tensors of the stage before", _EAGER,
         lambda a: a.pipeline_parallel and not a.host.pipeline),
    Rule("lora", "`--enable-lora`, `--lora-paths`", "graphs are captured without adapters", _EAGER,
         lambda a: a.lora and not a.host.lora),
    Rule("a2a", "`--moe-a2a-backend`", "nobody has tried prefill graphs with this all-to-all backend",
         "use `--moe-a2a-backend deepep`, or `--disable-prefill-cuda-graph`", lambda a: a.a2a not in a.host.a2a),
    Rule("two_batch_overlap", "`--enable-two-batch-overlap`",
         "it dispatches past the MoE layer, so DeepEP's dispatch would be captured", _EAGER,
         lambda a: a.two_batch_overlap),
    Rule("single_batch_overlap", "`--enable-single-batch-overlap`",
         "the shared experts run in a hook of the dispatch, which a replay does not call: they would be missing", _EAGER,
         lambda a: a.single_batch_overlap and a.a2a != "none"),
    Rule("multimodal", "the model", "replays of multimodal prefills fault, but for models that SGLang lists",
         "keep prefills eager with `--disable-prefill-cuda-graph`", lambda a: a.multimodal),
    Rule("memory_saver", "`SGLANG_MEMORY_SAVER_CUDA_GRAPH`", "SGLang's breakable graphs refuse it when they capture",
         "unset it, or keep prefills eager with `--disable-prefill-cuda-graph`", lambda a: a.memory_saver),
    Rule("eplb_lp", "`--enable-eplb`, `--ep-dispatch-algorithm lp`",
         "rebalancing replaces the solvers that captured graphs hold, and tokens would go to the wrong experts",
         "use `--ep-dispatch-algorithm static` or `dynamic`, or `--disable-prefill-cuda-graph`",
         lambda a: a.eplb_lp and not a.host.own_break),
    Rule("elastic", "`--elastic-ep-backend`",
         "the map of experts is replaced when ranks join, and captured graphs hold the old one", _EAGER,
         lambda a: a.elastic and not a.host.own_break),
    # SGLang pads the lengths of a batch to the group's largest, and cuts its rows to the real ones; kernels
    # that take a length for each row refuse that. flashmla_sparse takes none.
    Rule("kv_cache", "`--kv-cache-dtype`",
         "attention over a quantized cache gets a length for each padded row, but only real rows",
         "use `--kv-cache-dtype bfloat16`, or `--disable-prefill-cuda-graph`", lambda a: a.fp8_kv and not a.host.own_break),
    Rule("dsa_prefill", "`--dsa-prefill-backend`", "this attention gets a length for each padded row, but only real rows",
         "use `--dsa-prefill-backend flashmla_sparse`, or `--disable-prefill-cuda-graph`",
         lambda a: a.dsa_prefill not in ("flashmla_sparse", "flashmla_auto") and not a.fp8_kv and not a.host.own_break),
    Rule("vote_off", "`[vote] enabled = false`", "DP ranks could take different paths into a collective",
         "leave the feature on", lambda a: a.attention_dp > 1 and not (a.vote or a.host.own_break)),
    Rule("moe_off", "`[moe] enabled = false`", "DeepEP's dispatch would be captured, which never ends",
         "leave the feature on", lambda a: a.a2a == "deepep" and not (a.moe or a.host.own_break)),
    Rule("low_latency", "`--deepep-mode low_latency`", "a bucket has more tokens than its buffers take",
         "use `--deepep-mode auto`", lambda a: a.a2a == "deepep" and a.deepep_mode == "low_latency" and not a.host.own_break),
)  # fmt: skip


def hits(arguments: Arguments) -> tuple[Rule, ...]:
    """The rules against prefill graphs, in the order of the table; empty when they are safe."""
    return tuple(rule for rule in RULES if rule.hit(arguments))


def settle(sizes: Sequence[object], multiple: int, context: int | None, pool: int | None) -> Ladder:
    """The ladder that will be captured: ascending, without repeats, aligned, no larger than can be used.

    ``context``: the longest request in tokens, where a bucket is captured as one request; ``pool``:
    tokens the KV pool holds. Raises ValueError when a size is no number of tokens, or none is left.
    """
    checked: list[int] = []
    for size in sizes:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ValueError(f"bucket {size!r} is not a whole number of tokens, at least 1")
        checked.append(size)
    if not checked:
        raise ValueError("no bucket is left: the smallest that SGLang makes has 4 tokens")
    ceiling = align_up(max(checked), multiple)
    if pool is not None:
        ceiling = min(ceiling, align_up(pool, multiple))
    if context is not None:
        ceiling = min(ceiling, align_down(context, multiple))
    if ceiling < 1:
        raise ValueError(f"no bucket is left: buckets are multiples of {multiple}, and a request has at most {context} tokens")
    return fitted(checked, multiple, ceiling)


DEEPEP_RESERVE_MB = 1024.0
"""What SGLang sets aside for DeepEP under prefill graphs from 0.5.17 on: bridge pool and first touch of NVLink buffers."""


def staging_mb(tokens: int, hidden_size: int) -> float:
    """MiB of the break's staging buffers: hidden states in and out, two bytes an element.

    ``tokens`` of one rank in the largest bucket. Top-k and router logits add under 5 %.
    """
    return 2 * tokens * hidden_size * 2 / 2**20


def text(ladder: Sequence[object]) -> str:
    """A ladder for a log line: in full when it is short."""
    if len(ladder) <= 8:
        return f"[{', '.join(map(str, ladder))}]"
    return f"{len(ladder)} buckets, {ladder[0]} to {ladder[-1]} tokens"
