"""The one predicate: may this rank replay this batch? All reasons against, as a bit mask.

Contract: :func:`reasons_against` is pure and reads only rank-local facts, so the schedule-time
vote and the forward-time check, which are thin adapters over it, cannot disagree about the same
facts. It never touches a device. A fact that is unknown at schedule time is None and gives no
reason; who may leave a fact unknown is stated at the field.
"""

from __future__ import annotations

from typing import NamedTuple

from sglang_bcg_dsa import reasons
from sglang_bcg_dsa.buckets import bucket_for


class BatchFacts(NamedTuple):
    """What one rank knows of one prefill batch."""

    batch_size: int
    num_tokens: int
    """Tokens this rank will run, already aligned as the host aligns them before it pads."""
    prefill: bool = True
    """EXTEND or MIXED, or a decode batch that the host turns into one."""
    input_embeds: bool = False
    replace_embeds: bool = False
    has_prefix: bool = False
    is_target_verify: bool = False
    hidden_mode: int | None = None
    """CaptureHiddenMode value the batch needs; None where speculation decides it later, uniformly."""
    return_logprob: bool = False
    lora: bool = False
    is_mixed: bool = False
    multimodal: bool = False
    context_length: int | None = None
    """Longest context of the batch in tokens; needed only if the runner has a limit."""
    inactive_rank: bool = False
    """Forward time only: a rank of the group holds no tokens. The same on every rank."""


class RunnerFacts(NamedTuple):
    """What one rank's captured graphs can serve. Fixed after capture."""

    ladder: tuple[int, ...]
    hidden_mode: int = 0
    hidden_mode_exact: bool = True
    """The host replays only the captured hidden mode, not also lesser ones."""
    hidden_mode_scheduled: bool = True
    """The scheduler knows the hidden mode; false under speculation, where a worker sets it later."""
    prefix: bool = True
    logprob: bool = True
    lora: bool = True
    mixed: bool = True
    multimodal: bool = True
    max_context: int | None = None
    max_batch_size: int | None = None
    padding_factor: int = 2
    """A bucket of more than this many times the batch's tokens wastes more than it saves
    (SGLang's `_MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR`)."""
    padding_free: int = 0
    """A bucket up to this many tokens is never too much: a replay of it takes as long as one of a few tokens."""
    pads_to_group: bool = False
    """Every rank of a group runs the bucket of the largest: padding is the group's, not the rank's."""

    def pads_too_much(self, tokens: int) -> bool:
        """Whether the bucket of ``tokens`` is too large for them. False above the ladder, which is a reason of its own.

        For nothing at all any bucket is: a rank with nothing to run does not replay.
        """
        bucket = bucket_for(tokens, self.ladder)
        return bucket is not None and (not tokens or bucket > max(self.padding_free, tokens * self.padding_factor))


def reasons_against(batch: BatchFacts, runner: RunnerFacts | None) -> int:
    """Every reason why this rank may not replay this batch; 0 means it may."""
    if not batch.prefill:
        return reasons.NOT_PREFILL
    if runner is None:
        return reasons.NO_GRAPH_RUNNER
    mask = 0
    if batch.input_embeds:
        mask |= reasons.INPUT_EMBEDS
    if batch.replace_embeds:
        mask |= reasons.REPLACE_EMBEDS
    if batch.has_prefix and not runner.prefix:
        mask |= reasons.PREFIX
    if batch.is_target_verify:
        mask |= reasons.TARGET_VERIFY
    if batch.hidden_mode is not None and (
        batch.hidden_mode != runner.hidden_mode
        if runner.hidden_mode_exact
        else batch.hidden_mode > runner.hidden_mode
    ):
        mask |= reasons.HIDDEN_MODE
    if batch.return_logprob and not runner.logprob:
        mask |= reasons.LOGPROB
    if batch.lora and not runner.lora:
        mask |= reasons.LORA
    if batch.is_mixed and not runner.mixed:
        mask |= reasons.MIXED
    if batch.multimodal and not runner.multimodal:
        mask |= reasons.MULTIMODAL
    if runner.max_context is not None and (
        batch.context_length is None or batch.context_length > runner.max_context
    ):
        mask |= reasons.CONTEXT_LENGTH
    if runner.max_batch_size is not None and batch.batch_size > runner.max_batch_size:
        mask |= reasons.BATCH_SIZE
    if batch.num_tokens > runner.ladder[-1]:
        mask |= reasons.ABOVE_LADDER
    elif runner.pads_too_much(batch.num_tokens):
        mask |= reasons.PADDING
    if batch.inactive_rank:
        mask |= reasons.INACTIVE_RANK
    return mask
