"""One rank of a benchmark: the host's model runner, forwards of given sizes, eager and with graphs.

Contract: all ranks make the same calls in the same order. Every forward is the host's own
``ModelRunner.forward`` of a batch that the host's own scheduler code built and voted on; nothing is
sampled. Eager and graphs run in one process, on the same weights, batches and cache slots, in
turns. Times are the slowest rank's, differences the worst rank's.

Not measured: the scheduler, sampling, HTTP.
"""

# mypy: allow-untyped-calls
from __future__ import annotations

import copy
import cProfile
import functools
import pstats
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sglang_bcg_dsa.buckets import bucket_for
from sglang_bcg_dsa.engine import BreakTimes
from sglang_bcg_dsa.seams import SeamSet, examine, resolve

DONE = "done"
WARMUPS = 3
"""Unmeasured forwards before each block."""
BLOCKS = 4
"""How often eager and graphs take turns, so that a drifting clock shows in both."""
_PROFILED = 40
_VOCABULARY = 10_000
"""Token ids are drawn below it, as the host's own one-batch benchmark does."""


def main(server_args: Any, port_args: Any, options: Any, rank: int, results: Any) -> None:
    """Entry of a spawned process. Rank 0 puts each measurement into ``results`` when it is made, then ``DONE``."""
    # Importing the scheduler is what tells the plugin that this process runs a model.
    import sglang.srt.managers.scheduler  # noqa: F401
    from sglang.srt.plugins import load_plugins
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    seams = examine()
    captures, splits = Captures(), BreakTimes()
    HookRegistry.register(seams["runner.capture"].target, captures.on_capture, HookType.AROUND)
    HookRegistry.register(seams["runner.capture_one"].target, captures.on_capture_one, HookType.AROUND)
    HookRegistry.register(seams["bench.replay"].target, splits.on_replay, HookType.AROUND)
    if options.weights == "seeded":
        from sglang_bcg_dsa.testing import weights

        weights.register()
    load_plugins()
    bench = Bench(_load_model(server_args, port_args, rank), seams, options)
    _report(results, rank, "graphs", bench.has_graphs)
    _report(results, rank, "ladder", bench.ladder)
    _report(results, rank, "capture", captures.summary())
    parts: list[tuple[str, Callable[[Any], Any], Sequence[Any]]] = [
        ("check", bench.check, options.check), ("time", bench.time, options.tokens)
    ]  # fmt: skip
    if bench.has_graphs:
        parts += [("split", functools.partial(bench.split, times=splits), options.tokens)]
        if bench.refreshes:
            parts += [("refresh", bench.refresh, options.tokens)]
        parts += [("profile", bench.profile, options.profile)]
    for name, measure, cases in parts:
        found: list[Any] = []
        for case in cases:
            found.append(measure(case))
            # All so far: a run that is cut keeps it.
            _report(results, rank, name, list(found))
    _report(results, rank, DONE, None)
    bench.barrier()


def _report(results: Any, rank: int, name: str, value: Any) -> None:
    if rank == 0:
        results.put((name, value))


def _load_model(server_args: Any, port_args: Any, rank: int) -> Any:
    """The host's model runner with its graphs captured, as the host's one-batch benchmark makes it."""
    from sglang.benchmark import one_batch

    one_batch.initialize_moe_config(server_args)
    one_batch.initialize_fp8_gemm_config(server_args)
    one_batch.initialize_fp4_gemm_config(server_args)
    one_batch.configure_logger(server_args, prefix=f" TP{rank}")
    loaded, _ = one_batch.load_model(server_args, port_args, rank, rank)
    return loaded.torch_runner


class Captures:
    """What the capture took: seconds and device bytes, in all and by bucket."""

    def __init__(self) -> None:
        self._total: dict[str, float] | None = None
        self._buckets: list[dict[str, float]] = []

    def on_capture(self, original: Callable[..., Any], runner: Any) -> Any:
        """All buckets, the host's own warm-up included."""
        with _Meter() as meter:
            result = original(runner)
        self._total = meter.read()
        return result

    def on_capture_one(self, original: Callable[..., Any], runner: Any, size: int, *args: Any, **kwargs: Any) -> Any:
        """One bucket: two warm-up forwards and the capture."""
        with _Meter() as meter:
            result = original(runner, size, *args, **kwargs)
        self._buckets.append({"bucket": int(size), **meter.read()})
        return result

    def summary(self) -> dict[str, Any] | None:
        """None where nothing was captured."""
        return None if self._total is None else {**self._total, "buckets": self._buckets}


class _Meter:
    """Seconds, and device memory: in all, of that what torch's allocator holds (the rest is NCCL's, DeepEP's
    and the graphs' own), and of that what is pinned for graphs (the rest serves eager forwards too)."""

    def __enter__(self) -> _Meter:
        self._before = self._now()
        return self

    def __exit__(self, *exc: object) -> None:
        self._after = self._now()

    def read(self) -> dict[str, float]:
        """``seconds``, ``bytes``, ``torch_bytes``, ``graph_bytes``."""
        return {name: after - before for (name, before), (_, after) in zip(self._before, self._after, strict=True)}

    @staticmethod
    def _now() -> list[tuple[str, float]]:
        import torch

        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info()
        return [
            ("bytes", total - free),
            ("torch_bytes", torch.cuda.memory_reserved()),
            ("graph_bytes", sum(s["total_size"] for s in torch.cuda.memory_snapshot() if any(s["segment_pool_id"]))),
            ("seconds", time.perf_counter()),
        ]


class _Recorder:
    """Stands before the model runner while the host's code builds a batch; keeps the batch instead of running it."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.batch: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def forward(self, batch: Any) -> Any:
        """Keep ``batch``."""
        self.batch = batch
        return SimpleNamespace(logits_output=SimpleNamespace(next_token_logits=None))

    def sample(self, *args: Any) -> None:
        """Nothing is sampled."""


class Bench:
    """Builds batches and runs them, on one rank."""

    def __init__(self, runner: Any, seams: SeamSet, options: Any) -> None:
        import torch

        self._torch = torch
        self._runner = runner
        self._graphs = runner.prefill_cuda_graph_runner
        self.has_graphs = hasattr(self._graphs, "capture_num_tokens")
        self.ladder: list[int] = sorted(self._graphs.capture_num_tokens) if self.has_graphs else []
        self._flag = seams.field("forward.verdict")
        self._options = options
        self._dp_rank = int(resolve(seams["parallel"])().attn_dp_rank)
        self.refreshes = getattr(runner.attn_backend, "selects_in_breaks", False)
        """Whether our backend refreshes captured metadata in the place of the host's."""

    # ------------------------------------------------------------------ one forward

    def batch(self, lengths: tuple[int, ...], prefix: int = 0) -> Any:
        """A prefill of requests of these lengths, seeded by rank; the pools are emptied before.

        The first ``prefix`` tokens of each are run before, eagerly and one request at a time, so that the cache
        holds the same whatever the batch.
        """
        import numpy
        from sglang.benchmark import one_batch

        self._runner.req_to_token_pool.clear()
        self._runner.token_to_kv_pool_allocator.clear()
        draw = numpy.random.default_rng([self._options.seed, self._dp_rank])
        ids = [draw.integers(0, _VOCABULARY, prefix + n, dtype=numpy.int64) for n in lengths]
        requests = one_batch.prepare_synthetic_inputs_for_latency_test(
            len(lengths), 0, [tokens[:prefix] if prefix else tokens for tokens in ids]
        )
        recorder = _Recorder(self._runner)
        if prefix:
            for request in requests:
                one_batch.extend([request], recorder)
                self.forward(recorder.batch, graphs=False)
            one_batch.prepare_extend_inputs_for_correctness_test(
                SimpleNamespace(cut_len=prefix), [tokens.tolist() for tokens in ids], requests, self._runner
            )
        one_batch.extend(requests, recorder)
        return recorder.batch

    def forward(self, batch: Any, *, graphs: bool) -> Any:
        """Run a copy of ``batch``: the host pads and changes what it runs. Returns the next tokens' logits."""
        mine = copy.copy(batch)
        if not graphs:
            # What a server without prefill graphs hands down: no verdict, so no padding to a common bucket.
            setattr(mine, self._flag, False)
            self._runner.prefill_cuda_graph_runner = self._runner.eager_runner
        try:
            with self._torch.no_grad():
                output = self._runner.forward(mine)
        finally:
            self._runner.prefill_cuda_graph_runner = self._graphs
        if bool(output.can_run_graph) != graphs:
            raise RuntimeError(f"a forward of {len(batch.input_ids)} tokens ran {'eager' if graphs else 'as a graph'}")
        return output.logits_output.next_token_logits

    def barrier(self) -> None:
        """Wait for the device, then for all ranks."""
        self._torch.cuda.synchronize()
        if self._torch.distributed.get_world_size() > 1:
            self._torch.distributed.barrier()

    # ------------------------------------------------------------------ measurements

    def check(self, case: Any) -> dict[str, Any]:
        """Logits with graphs against eager, and eager against itself, on the same inputs."""
        lengths, prefix = case
        batch = self.batch(lengths, prefix)
        first = self.forward(batch, graphs=False).float()
        again = self.forward(batch, graphs=False).float()
        found: dict[str, Any] = {"lengths": list(lengths), "prefix": prefix, "spread": self._worst(first, again)}
        found["eager_tokens_differ"] = self._differing(first, again)
        found["scale"] = float(first.std())
        if self.has_graphs:
            graph = self.forward(batch, graphs=True).float()
            found["difference"] = self._worst(first, graph)
            found["tokens_differ"] = self._differing(first, graph)
            # Matrix kernels round by the row count. An eager batch that fills the bucket with another
            # request has the graph's; it also shows what batching alone changes.
            filler = (bucket_for(sum(lengths), self.ladder) or 0) - sum(lengths)
            if filler > 0:
                full = self.forward(self.batch((*lengths, filler), prefix), graphs=False).float()[: len(lengths)]
                found["batching"] = self._worst(first, full)
                found["difference_full"] = self._worst(graph, full)
        return found

    def time(self, tokens: int) -> dict[str, Any]:
        """Milliseconds of one prefill forward of ``tokens`` on each rank, eager and with graphs in turns.

        ``peak_bytes``: the most that a forward allocates beyond what was allocated before it; what is pinned for
        graphs was.
        """
        batch = self.batch((tokens,))
        found: dict[str, Any] = {"tokens": tokens}
        kinds = {"eager": False, "graphs": True} if self.has_graphs else {"eager": False}
        samples: dict[str, dict[str, list[float]]] = {kind: {"gpu_ms": [], "wall_ms": []} for kind in kinds}
        for _ in range(BLOCKS):
            for kind, graphs in kinds.items():
                gpu, wall = self._block(functools.partial(self.forward, batch, graphs=graphs))
                samples[kind]["gpu_ms"] += gpu
                samples[kind]["wall_ms"] += wall
        for kind, measures in samples.items():
            found[kind] = {name: _spread(values) for name, values in measures.items()}
            found[kind]["peak_bytes"] = self._peak(functools.partial(self.forward, batch, graphs=kinds[kind]))
        if self.has_graphs:
            found["ratio"] = {
                name: found["graphs"][name]["median"] / found["eager"][name]["median"] for name in ("gpu_ms", "wall_ms")
            }
        return found

    def split(self, tokens: int, times: BreakTimes) -> dict[str, Any]:
        """Where the time of a replay goes: segments and each kind of break, on rank 0."""
        batch = self.batch((tokens,))
        self.forward(batch, graphs=True)
        self.barrier()
        with times:
            for _ in range(self._options.repeats):
                self.forward(batch, graphs=True)
                self._torch.cuda.synchronize()
        return {"tokens": tokens, "parts": times.parts(self._options.repeats)}

    def refresh(self, tokens: int) -> dict[str, Any]:
        """Milliseconds that bring captured metadata to the values of a batch, as the host does it and as we do, in turns.

        Both from the same batch, from the call to the last kernel's end. ``syncs``: whether ours waited for the device.
        """
        torch, backend = self._torch, self._runner.attn_backend
        base: Any = type(backend).__mro__[1]
        batch = self.batch((tokens,))
        calls: list[Any] = []
        prepare = backend.prepare_forward_metadata_for_breakable_cuda_graph_replay

        def note(*args: Any, **kwargs: Any) -> None:
            calls.append((args, kwargs))
            prepare(*args, **kwargs)

        backend.prepare_forward_metadata_for_breakable_cuda_graph_replay = note
        try:
            self.forward(batch, graphs=True)
        finally:
            del backend.prepare_forward_metadata_for_breakable_cuda_graph_replay
        ((captured, live), static), *_ = calls
        host_captured = base.init_forward_metadata_for_breakable_cuda_graph_capture(backend, *static.values())
        refreshes: dict[str, Callable[[], None]] = {
            "host": functools.partial(
                base.prepare_forward_metadata_for_breakable_cuda_graph_replay, backend, host_captured, live, **static
            ),
            "plugin": functools.partial(prepare, captured, live, **static),
        }
        found: dict[str, Any] = {"tokens": tokens, "syncs": False}
        samples: dict[str, list[float]] = {name: [] for name in refreshes}
        for _ in range(BLOCKS):
            for name, run in refreshes.items():
                for turn in range(WARMUPS + self._options.repeats):
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    run()
                    torch.cuda.synchronize()
                    if turn >= WARMUPS:
                        samples[name].append((time.perf_counter() - start) * 1e3)
        found.update({name: _spread(values) for name, values in samples.items()})
        torch.cuda.set_sync_debug_mode("error")
        try:
            refreshes["plugin"]()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            found["syncs"] = True
        finally:
            torch.cuda.set_sync_debug_mode("default")
        return {**found, "ratio": found["plugin"]["median"] / found["host"]["median"]}

    def profile(self, tokens: int) -> dict[str, Any]:
        """The functions that take most of the processor's time in a replay, on this rank: calls and own milliseconds."""
        batch = self.batch((tokens,))
        self.forward(batch, graphs=True)
        self.barrier()
        profiler, repeats = cProfile.Profile(), self._options.repeats
        for _ in range(repeats):
            profiler.enable()
            self.forward(batch, graphs=True)
            profiler.disable()
            self._torch.cuda.synchronize()
        rows = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
        top = sorted(rows, key=lambda row: -row[1][2])[:_PROFILED]
        return {
            "tokens": tokens,
            "functions": [
                {"function": f"{Path(file).name}:{line} {name}", "calls": calls / repeats, "own_ms": own * 1e3 / repeats,
                 "all_ms": everything * 1e3 / repeats}
                for (file, line, name), (_, calls, own, everything, _) in top
            ],
        }  # fmt: skip

    def _block(self, run: Callable[[], Any]) -> tuple[list[float], list[float]]:
        from flashinfer.testing.utils import bench_gpu_time_with_cuda_event

        repeats = self._options.repeats
        self.barrier()
        gpu = bench_gpu_time_with_cuda_event(run, dry_run_iters=WARMUPS, repeat_iters=repeats, cold_l2_cache=False)
        wall = []
        for _ in range(repeats):
            self.barrier()
            start = time.perf_counter()
            run()
            self._torch.cuda.synchronize()
            wall.append((time.perf_counter() - start) * 1e3)
        return list(gpu), self._all(wall, max)

    def _peak(self, run: Callable[[], Any]) -> int:
        cuda = self._torch.cuda
        self.barrier()
        cuda.reset_peak_memory_stats()
        before = cuda.memory_allocated()
        run()
        cuda.synchronize()
        return int(self._all([cuda.max_memory_allocated() - before], max)[0])

    # ------------------------------------------------------------------ over ranks

    def _worst(self, one: Any, other: Any) -> float:
        return float(self._all([float((one - other).abs().max())], max)[0])

    def _differing(self, one: Any, other: Any) -> int:
        return int(self._all([int((one.argmax(-1) != other.argmax(-1)).sum())], sum)[0])

    def _all(self, values: list[Any], reduce: Callable[[Any], Any]) -> list[Any]:
        from flashinfer.testing.utils import aggregate_gpu_time_across_ranks

        return list(aggregate_gpu_time_across_ranks(values, reduce))


def _spread(values: list[float]) -> dict[str, float]:
    ordered = sorted(values)
    return {
        "median": statistics.median(ordered),
        "p10": ordered[len(ordered) // 10],
        "p90": ordered[len(ordered) * 9 // 10],
        "n": len(ordered),
    }
