"""Builtin feature ``explain``: counts prefills and says why they did not replay.

Contract: counters are published under ``/server_info`` of every DP rank, and under ``/metrics`` by
the ranks that publish SGLang's own; a summary line goes to the log while there are prefills, and
coverage that stays at zero is warned about once, with the reasons. What it observes comes through
the same hooks that third-party plugins have.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

from sglang_bcg_dsa import __version__, reasons
from sglang_bcg_dsa.config import Config
from sglang_bcg_dsa.hooks import hookimpl
from sglang_bcg_dsa.installer import Installer
from sglang_bcg_dsa.ledger import Ledger
from sglang_bcg_dsa.metrics import Exporter
from sglang_bcg_dsa.progress import Progress
from sglang_bcg_dsa.reasons import ReasonTable, meaning
from sglang_bcg_dsa.records import Captured, Feature, Forward, State
from sglang_bcg_dsa.seams import SeamSet, resolve
from sglang_bcg_dsa.vote import Verdict

logger = logging.getLogger(__name__)

STATE_KEY = "bcg_dsa"
"""Key of our entry in each rank's internal state under ``/server_info``."""


class ExplainFeature:
    """Counters, ``/server_info``, ``/metrics``, the summary line and the zero-coverage warning."""

    name = "explain"

    def __init__(self, hooks: Any, progress: Progress, features: Callable[[], dict[str, Any]]) -> None:
        self._hooks = hooks
        self._progress = progress
        self._features = features
        self._warned = False
        self._due = 0.0

    # ------------------------------------------------------------------ plugin hooks

    @hookimpl
    def bcg_feature(self, config: Config, seams: SeamSet) -> Feature:
        return Feature(self.name, State.SUPPLIED, "SGLang counts neither reasons nor buckets of prefill graphs")

    @hookimpl
    def bcg_install(self, config: Config, seams: SeamSet, reasons: ReasonTable, installer: Installer) -> None:
        self._settings = config.explain
        self._table = reasons
        self.ledger = Ledger(reasons)
        self._get_parallel = resolve(seams["parallel"])
        installer.around("forward.eager", self.on_eager)
        installer.around("runner.capture_one", self.on_capture_one)
        installer.after("scheduler.state", self.on_state)
        installer.after("scheduler.metrics", self.on_metrics)

    @hookimpl
    def bcg_forward(self, forward: Forward) -> None:
        self.ledger.count_forward(forward)
        now = time.monotonic()
        if now >= self._due:
            self._summarise(now)
        if not self._warned and self.ledger.forwards >= self._settings.zero_coverage_after:
            self._warn_zero_coverage()

    @hookimpl
    def bcg_verdict(self, verdict: Verdict) -> None:
        self.ledger.count_verdict(verdict)

    @hookimpl
    def bcg_captured(self, captured: Captured) -> None:
        self.ledger.count_captured(captured)

    @hookimpl
    def bcg_state(self) -> dict[str, Any]:
        now = round(time.time(), 3)
        return {"version": __version__, "time": now, "rank": self._rank(), **self._features(), **self.ledger.snapshot()}

    # ------------------------------------------------------------------ host hooks

    def on_eager(self, original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """An eager forward. Counted here only where no graph runner was asked about it."""
        model = runner.model_runner
        if forward_batch.forward_mode.is_extend() and not model.is_draft_worker and _has_no_graphs(model):
            tokens = len(forward_batch.input_ids)
            self._hooks.bcg_forward(
                forward=Forward(False, reasons.NO_GRAPH_RUNNER, tokens, tokens, None, None, 0.0)
            )
        return original(runner, forward_batch, *args, **kwargs)

    def on_capture_one(self, original: Callable[..., Any], runner: Any, size: int, *args: Any, **kwargs: Any) -> Any:
        """Time the capture of one bucket, warm-ups included, and the memory it took."""
        before, start = _device_bytes(runner.device), time.perf_counter()
        try:
            result = original(runner, size, *args, **kwargs)
        except Exception as error:
            self.ledger.count_capture_failed()
            logger.critical("sglang-bcg-dsa: capture of bucket %d failed: %s", size, error)
            raise
        seconds = time.perf_counter() - start
        after = _device_bytes(runner.device)
        if not runner.model_runner.is_draft_worker:
            took = after - before if after is not None and before is not None else None
            self._hooks.bcg_captured(captured=Captured(int(size), seconds, took))
        return result

    def on_state(self, result: Any, *args: Any, **kwargs: Any) -> Any:
        """Add our entries to what this rank answers to ``/server_info``."""
        entries: dict[str, Any] = {}
        for part in self._hooks.bcg_state():
            entries.update(part or {})
        result.internal_state[STATE_KEY] = entries
        return result

    def on_metrics(self, result: Any, *args: Any, **kwargs: Any) -> None:
        """SGLang made its collector: ours joins it, with its labels, where it is to publish."""
        if result.current_scheduler_metrics_enabled:
            Exporter(self.ledger, self._progress, result.collector.labels, self._voters).start()

    def _voters(self) -> int:
        parallel = self._get_parallel()
        return int(parallel.attn_dp_size) if int(parallel.tp_rank) == 0 else 0

    def _rank(self) -> dict[str, int]:
        parallel = self._get_parallel()
        return {"dp": int(parallel.attn_dp_rank), "tp": int(parallel.tp_rank)}

    # ------------------------------------------------------------------ log

    def _summarise(self, now: float) -> None:
        first, self._due = self._due == 0.0, now + self._settings.summary_seconds
        replayed, eager = self.ledger.interval()
        if first:
            return
        logger.info(
            "sglang-bcg-dsa: %d prefills in the last %.0f s, %d replayed (%.1f %%); since start %.1f %%; reasons: %s",
            replayed + eager,
            self._settings.summary_seconds,
            replayed,
            100 * replayed / max(1, replayed + eager),
            100 * (self.ledger.coverage or 0),
            ", ".join(f"{name} {times}" for name, times in self.ledger.reasons().items()) or "none",
        )

    def _warn_zero_coverage(self) -> None:
        self._warned = True
        if self.ledger.replayed:
            return
        why = "; ".join(
            f"{name} ({times}{': ' + meaning(name) if meaning(name) else ''})"
            for name, times in self.ledger.reasons().items()
        )
        logger.warning(
            "sglang-bcg-dsa: none of the first %d prefills replayed a graph. Reasons: %s",
            self.ledger.forwards,
            why,
        )


def states_of(server_info: dict[str, Any]) -> list[dict[str, Any]]:
    """Our entries in an answer of ``/server_info``, by rank; empty where the plugin is not active."""
    found = [state[STATE_KEY] for state in server_info["internal_states"] if STATE_KEY in state]
    return sorted(found, key=lambda state: (state["rank"]["dp"], state["rank"]["tp"]))


def _has_no_graphs(model_runner: Any) -> bool:
    """Whether eager prefills of this model bypass the forward-time check."""
    return not hasattr(model_runner.prefill_cuda_graph_runner, "capture_num_tokens")


def _device_bytes(device: Any) -> int | None:
    """Bytes in use on the device, or None where it is not a CUDA device."""
    import torch

    if torch.device(device).type != "cuda":
        return None
    free, total = torch.cuda.mem_get_info()
    return total - free
