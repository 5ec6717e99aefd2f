"""Adapters from SGLang's batches and runner to the facts of the predicate.

Contract: pure reading, no device access. Attribute names that differ between hosts come from the
seam table. Nothing here decides.
"""

from __future__ import annotations

import inspect
from typing import Any

from sglang_bcg_dsa.buckets import align_up
from sglang_bcg_dsa.predicate import BatchFacts, RunnerFacts
from sglang_bcg_dsa.seams import Seam, SeamSet, resolve

PADDING_FREE = 256
"""Tokens. Measured, two H200s, DSA + DeepEP: a replay of 256 tokens takes as long as one of 64 (14.4 ms,
eager 40 ms for either), so no batch is too small for it. Used where the host leaves the decision to us."""


def of_schedule_batch(batch: Any, tokens: int, alignment: int, runner: RunnerFacts | None, convertible: bool) -> BatchFacts:
    """Facts of a ScheduleBatch that is about to be voted on.

    ``tokens``: what the host gathers for it. ``convertible``: the host would run this decode batch
    as a prefill of one token a request, if the group replays.
    """
    mode = batch.forward_mode
    prefill = bool(mode.is_extend())
    if not prefill and not convertible:
        return BatchFacts(batch.batch_size(), tokens, prefill=False)
    padded = align_up(tokens, alignment)
    longest = _longest(batch.seq_lens_cpu) if runner is not None and runner.max_context is not None else None
    if not prefill:
        return BatchFacts(batch.batch_size(), padded, context_length=longest)
    return BatchFacts(
        batch_size=batch.batch_size(),
        num_tokens=padded,
        input_embeds=batch.input_embeds is not None,
        replace_embeds=batch.replace_embeds is not None,
        has_prefix=any(batch.prefix_lens or ()),
        is_target_verify=bool(mode.is_target_verify()),
        hidden_mode=_scheduled_hidden_mode(batch, runner),
        return_logprob=bool(batch.return_logprob),
        is_mixed=bool(mode.is_mixed()),
        multimodal=_has_images(batch) if runner is not None and not runner.multimodal else False,
        context_length=longest,
    )


def of_forward_batch(batch: Any, runner: RunnerFacts, inactive_rank: bool) -> BatchFacts:
    """Facts of a ForwardBatch, after the host padded it for its group."""
    mode = batch.forward_mode
    return BatchFacts(
        batch_size=batch.batch_size,
        num_tokens=len(batch.input_ids),
        prefill=bool(mode.is_extend()),
        input_embeds=batch.input_embeds is not None,
        replace_embeds=batch.replace_embeds is not None,
        has_prefix=any(batch.extend_prefix_lens_cpu or ()),
        is_target_verify=bool(mode.is_target_verify()),
        hidden_mode=None if is_idle(batch) else int(batch.capture_hidden_mode),
        return_logprob=bool(batch.return_logprob),
        is_mixed=bool(mode.is_mixed()),
        multimodal=False if runner.multimodal else bool(batch.contains_mm_inputs()),
        # Without host-side lengths the host reads the device's; its own check then decides alone.
        context_length=(_longest(batch.seq_lens_cpu) or 0) if runner.max_context is not None else None,
        inactive_rank=inactive_rank,
    )


def is_idle(batch: Any) -> bool:
    """Whether a ForwardBatch is an idle rank's, also where the host made up a request for it."""
    return bool((getattr(batch, "_original_forward_mode", None) or batch.forward_mode).is_idle())


def of_runner(runner: Any, seams: SeamSet) -> RunnerFacts:
    """What a PrefillCudaGraphRunner can serve, read once after it captured.

    Where the host has a rank-local predicate of its own, single facts are put to it, so that its
    refusals get their names; otherwise the host's rules, as far as it has any, are stated here.
    """
    ladder = tuple(sorted(runner.capture_num_tokens))
    known: dict[str, Any] = {
        "ladder": ladder,
        "hidden_mode": int(runner.capture_hidden_mode),
        "hidden_mode_scheduled": bool(runner.model_runner.spec_algorithm.is_none()),
        "padding_factor": resolve(seams["runner.padding"]),
    }
    if "runner.local" not in seams:
        any_prefix = getattr(runner.model_runner.attn_backend, "replays_any_prefix", False)
        return RunnerFacts(
            **known,
            prefix=any_prefix or not runner.has_mha_companion_layers,
            padding_free=PADDING_FREE,
            pads_to_group=bool(runner.require_mlp_tp_gather),
        )
    limits = [n for n in (getattr(runner, "max_context_size", None), getattr(runner, "max_seq_len", None)) if n]
    return RunnerFacts(
        **known,
        hidden_mode_exact=False,
        prefix=_host_allows(runner, seams["runner.local"], ladder[-1], prefix_lens=[1]),
        logprob=_host_allows(runner, seams["runner.local"], ladder[-1], return_logprob=True),
        mixed=_host_allows(runner, seams["runner.local"], ladder[-1], is_mixed=True),
        multimodal=_host_allows(runner, seams["runner.local"], ladder[-1], contains_mm_inputs=True),
        max_context=min(limits, default=None),
        max_batch_size=getattr(runner, "_captured_attn_metadata_max_bs", None),
    )


def _host_allows(runner: Any, seam: Seam, tokens: int, **fact: Any) -> bool:
    """Whether the host's predicate accepts one fact; True where it does not know that fact."""
    method = getattr(runner, seam.name.rpartition(".")[2])
    accepted = inspect.signature(method).parameters
    plain = {
        "batch_size": 1, "num_tokens": tokens, "input_embeds": None, "replace_embeds": None, "prefix_lens": None,
        "is_target_verify": False, "capture_hidden_mode": None, "return_logprob": False, "lora_ineligible": False,
        "is_mixed": False, "batch_max_context_len": 1, "contains_mm_inputs": False,
    }  # fmt: skip
    plain = {name: value for name, value in plain.items() if name in accepted}
    if not method(**plain) or not fact.keys() <= accepted.keys():
        return True
    return bool(method(**{**plain, **fact}))


def _scheduled_hidden_mode(batch: Any, runner: RunnerFacts | None) -> int | None:
    """The hidden mode a batch will want, where the scheduler can know it.

    Hosts that compare for equality derive it from the batch's own flag, which differs between
    ranks; the others capture the server's maximum, the same everywhere, and need no vote on it.
    """
    if runner is None or not runner.hidden_mode_exact or not runner.hidden_mode_scheduled:
        return None
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    return int(CaptureHiddenMode.FULL if batch.return_hidden_states else CaptureHiddenMode.NULL)


def _has_images(batch: Any) -> bool:
    return any(item is not None and item.contains_mm_input() for item in batch.multimodal_inputs or ())


def _longest(lengths: Any) -> int | None:
    """The longest of some host-side lengths; None when there are none."""
    if lengths is None or len(lengths) == 0:
        return None
    return int(max(lengths.tolist() if hasattr(lengths, "tolist") else lengths))
