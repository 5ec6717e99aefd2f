"""Ranks with the host's real DeepEPMoE, dispatcher and capture engine, for ``test_moe.py``.

One process imports the host and forks two ranks, which meet over gloo; ``deep_ep`` is the stand-in.
Each function named in ``CHECKS`` runs on all ranks at once and returns plain values; the process
prints one line of JSON, ``{check: [each rank's value, or the text of its error]}``.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

WORLD = 2
HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 16, 8, 4, 2
REDUNDANT = 2
TOKENS = 8
BARRIER_S = 20.0
LATE_S = 0.5
STEPS = 200


class Rank:
    """What a check works with on its rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.layers = [make_layer(3), make_layer(4)]

    def inputs(self, seed: int, tokens: int = TOKENS) -> list[Any]:
        """Hidden states and, for each layer, top-k weights and ids; different on each rank."""
        import torch

        rng = torch.Generator().manual_seed(100 * seed + self.rank)
        made = [torch.randn(tokens, HIDDEN, generator=rng)]
        for _ in self.layers:
            made += [torch.rand(tokens, TOP_K, generator=rng)]
            made += [torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(tokens)]).int()]
        return made

    def forward(self, static: list[Any], to_physical: Callable[[Any, int], Any] = lambda ids, layer: ids) -> Any:
        """Two layers with work before, between and after, as a model has it."""
        from sglang.srt.eplb.expert_distribution import get_global_expert_distribution_recorder
        from sglang.srt.layers.moe.topk import StandardTopKOutput

        hidden = static[0] * 1.5
        for i, layer in enumerate(self.layers):
            weights, ids = static[1 + 2 * i : 3 + 2 * i]
            shared = hidden * 0.25
            with get_global_expert_distribution_recorder().with_current_layer(layer.layer_id):
                out = layer(hidden, StandardTopKOutput(weights, to_physical(ids, layer.layer_id), None))
            hidden = shared.add_(out, alpha=0.5)
        return hidden + 1

    def eager(self, seed: int, **kwargs: Any) -> Any:
        """The host's own forward, outside any breakable region."""
        from sglang.srt.layers.dp_attention import set_is_extend_in_batch

        set_is_extend_in_batch(True)
        return self.forward(self.inputs(seed), **kwargs)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[Any]:
        """The host's breakable region and capture, as its prefill runner sets them up."""
        from sglang.srt.layers.dp_attention import set_is_extend_in_batch

        engine = host_engine()
        graph = engine.BreakableCUDAGraph()
        set_is_extend_in_batch(False)
        with engine.enable_breakable_cuda_graph(), engine.BreakableCUDAGraphCapture(graph):
            yield graph

    def capture(self, **kwargs: Any) -> Callable[[int], Any]:
        """Capture the forward; the result copies inputs in, replays and returns the output."""
        static = self.inputs(0)
        with self.capturing() as graph:
            result = self.forward(static, **kwargs)

        def replay(seed: int) -> Any:
            from sglang.srt.layers.dp_attention import set_is_extend_in_batch

            for to, value in zip(static, self.inputs(seed), strict=True):
                to.copy_(value)
            set_is_extend_in_batch(True)
            graph.replay()
            return result.clone()

        return replay


def host_engine() -> Any:
    from sglang.srt.model_executor.runner_backend_utils import breakable_cuda_graph

    return breakable_cuda_graph


def make_layer(layer_id: int) -> Any:
    """The class that the host's models would build, with weights that depend on the logical expert only."""
    import torch
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata
    from sglang.srt.layers.moe.ep_moe import layer as module

    layer = module.get_moe_impl_class(None)(
        num_experts=EXPERTS + REDUNDANT, top_k=TOP_K, hidden_size=HIDDEN, intermediate_size=INTERMEDIATE,
        layer_id=layer_id, params_dtype=torch.float32,
    )  # fmt: skip
    where = get_global_expert_location_metadata().physical_to_logical_map_cpu[layer_id].tolist()
    own = len(where) // WORLD
    rank = torch.distributed.get_rank()
    for name in ("w13_weight", "w2_weight"):
        weight = getattr(layer, name)
        for slot, logical in enumerate(where[rank * own : (rank + 1) * own]):
            rng = torch.Generator().manual_seed(1000 * layer_id + logical)
            weight.data[slot] = torch.randn(weight.shape[1:], generator=rng) / 3
    return layer


# --- checks -------------------------------------------------------------------------------------


def replay_equals_eager(rank: Rank) -> dict[str, Any]:
    import torch

    from sglang_bcg_dsa.testing import deep_ep_gloo

    expected = [rank.eager(seed) for seed in (1, 2)]
    before = deep_ep_gloo.counters.as_dict()
    replay = rank.capture()
    captured = deep_ep_gloo.counters.as_dict()
    got = [replay(seed) for seed in (1, 2)]
    after = deep_ep_gloo.counters.as_dict()
    return {
        "equal": [torch.equal(a, b) for a, b in zip(got, expected, strict=True)],
        "differ": not torch.equal(*got),
        "communication while capturing": sum(captured.values()) - sum(before.values()),
        "at replay": {name: after[name] - captured[name] for name in ("dispatch", "combine", "low_latency_dispatch")},
        "class": type(rank.layers[0]).__name__,
    }


def host_mode_is_restored(rank: Rank) -> dict[str, Any]:
    """The flag that the runner set, after a break that worked and one that did not; and the mode it ran in."""
    from sglang.srt.layers.dp_attention import get_is_extend_in_batch, set_is_extend_in_batch
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from sglang_bcg_dsa.testing import deep_ep_gloo

    x, weights, ids, *_ = rank.inputs(1)
    layer, seen, before = rank.layers[0], [], deep_ep_gloo.counters.low_latency_dispatch
    for bad in (False, True):
        for live in (False, True):
            with host_engine().enable_breakable_cuda_graph():
                set_is_extend_in_batch(live)
                try:
                    layer(x, StandardTopKOutput(weights, ids + 100 * bad, None))
                except ValueError as error:
                    layer.dispatcher._inners[0]._stage = type(layer.dispatcher._inners[0]._stage).INITIAL
                    seen.append(["refused", "outside" in str(error), get_is_extend_in_batch() == live])
                else:
                    seen.append(["done", get_is_extend_in_batch() == live])
    return {"seen": seen, "low latency": deep_ep_gloo.counters.low_latency_dispatch - before}


def recorder_counts(rank: Rank) -> dict[str, Any]:
    """What the host's own recorder counts, eager and replayed, and with a draft model's region."""
    with real_recorder(rank) as recorder:
        (gatherer,) = recorder._single_pass_gatherers.values()

        def counted(act: Callable[[], Any]) -> Any:
            gatherer.reset()
            act()
            return gatherer.collect()["global_physical_count"].tolist()

        replay = rank.capture()
        recorder._recording = recorder._record_current_pass = True
        eager, replayed = counted(lambda: rank.eager(1)), counted(lambda: replay(1))
        with recorder.disable_this_region():
            draft = rank.capture()
        return {"eager": eager, "replayed": replayed, "draft": counted(lambda: draft(1))}


@contextlib.contextmanager
def real_recorder(rank: Rank) -> Iterator[Any]:
    """The host's recorder, installed, as ``--expert-distribution-recorder-mode stat_approx`` makes it."""
    import inspect

    from sglang.srt import runtime_context
    from sglang.srt.eplb import expert_distribution as host
    from sglang.srt.eplb.expert_location import get_global_expert_location_metadata

    settings = {
        "expert_distribution_recorder_mode": "stat_approx", "deepep_mode": "normal",
        "expert_distribution_recorder_buffer_size": -1,
    }  # fmt: skip
    make, known = host._ExpertDistributionRecorderReal, (get_global_expert_location_metadata(), rank.rank)
    if "server_args" in inspect.signature(make.__init__).parameters:
        args = runtime_context.get_server_args()
        with changed(args, **settings):
            recorder = make(args, *known)
    else:
        with runtime_context.get_exec().moe.override(**settings):
            recorder = make(*known)
    host.set_global_expert_distribution_recorder(recorder)
    try:
        yield recorder
    finally:
        host.set_global_expert_distribution_recorder(host._ExpertDistributionRecorderNoop())


def rebalance(rank: Rank, stale: bool = False) -> dict[str, Any]:
    """Capture, let the host move experts between the ranks, replay. ``stale``: as if maps were replaced."""
    import torch
    from sglang.srt.eplb import expert_location as host
    from sglang.srt.eplb.expert_location_updater import ExpertLocationUpdater

    metadata = host.get_global_expert_location_metadata()
    kept = metadata.logical_to_rank_dispatch_physical_map.clone() if stale else None

    def to_physical(ids: Any, layer: int) -> Any:
        from sglang.srt.eplb import expert_location_dispatch as dispatch

        source = metadata.logical_to_rank_dispatch_physical_map if kept is None else kept
        info = dispatch.ExpertLocationDispatchInfo(
            "static", source[layer, :], metadata.logical_to_all_physical_map[layer, :],
            metadata.logical_to_all_physical_map_num_valid[layer, :], metadata.num_physical_experts,
        )  # fmt: skip
        return dispatch.topk_ids_logical_to_physical(ids, info)

    replay = rank.capture(to_physical=to_physical)
    before, placed = replay(1), metadata.physical_to_logical_map_cpu[3].tolist()
    new = placed[-1:] + placed[:-1]
    moved = location(torch.tensor([new] * metadata.num_layers), rank.rank)
    updater = ExpertLocationUpdater()
    updater._first_execution = False  # it would empty a device's cache
    updater.update(
        {layer.layer_id: [layer.w13_weight.data, layer.w2_weight.data] for layer in rank.layers},
        moved, update_layer_ids=[3, 4], nnodes=1, rank=rank.rank,
    )  # fmt: skip
    after = replay(1)
    return {
        "moved": placed != metadata.physical_to_logical_map_cpu[3].tolist() == new,
        "as eager": stale or torch.equal(after, rank.eager(1, to_physical=to_physical)),
        "as before": torch.allclose(before, after, rtol=1e-5, atol=1e-6),
    }


def stale_map(rank: Rank) -> dict[str, Any]:
    return rebalance(rank, stale=True)


def location(physical_to_logical: Any, rank: int) -> Any:
    """The host's metadata of a placement."""
    import torch
    from sglang.srt.eplb.expert_location import ExpertLocationMetadata

    layers, physical = physical_to_logical.shape
    all_physical = torch.full((layers, EXPERTS, physical), -1)
    for layer in range(layers):
        for logical in range(EXPERTS):
            slots = (physical_to_logical[layer] == logical).nonzero()[:, 0]
            all_physical[layer, logical, : len(slots)] = slots
    return ExpertLocationMetadata(
        physical_to_logical_map=physical_to_logical.clone(), physical_to_logical_map_cpu=physical_to_logical.clone(),
        logical_to_all_physical_map=all_physical, logical_to_all_physical_map_cpu=all_physical.clone(),
        logical_to_all_physical_map_num_valid=(all_physical >= 0).sum(-1), ep_size=WORLD,
        logical_to_rank_dispatch_physical_map=all_physical[:, :, 0].clone(),
    )  # fmt: skip


def refusals(rank: Rank) -> dict[str, str]:
    """Through the subclass's forward, at warm-up: in a breakable region, before any capture."""
    from sglang.srt.layers.moe.topk import BypassedTopKOutput, StandardTopKOutput
    from sglang.srt.runtime_context import get_flags, get_server_args

    layer = rank.layers[0]

    def text(tokens: int = TOKENS, make: Any = StandardTopKOutput) -> str:
        x, weights, ids, *_ = rank.inputs(1, tokens)
        with host_engine().enable_breakable_cuda_graph():
            return ended(lambda: layer(x, make(weights, ids, None)))[0]

    got = {"aligned": text(), "unaligned": text(9)}
    got["top-k"] = text(make=lambda weights, ids, logits: BypassedTopKOutput(weights, logits, None))
    with get_flags().moe.override(sbo_enabled=True):
        got["overlap"] = text()
    with changed(get_server_args(), enable_eplb=True, ep_dispatch_algorithm="lp"):
        got["lp"] = text()
    with changed(get_server_args(), enable_eplb=True, ep_dispatch_algorithm="static"):
        got["static"] = text()
    with changed(get_server_args(), elastic_ep_backend="mooncake"):
        got["elastic"] = text()
    return got


@contextlib.contextmanager
def changed(thing: Any, **values: Any) -> Iterator[None]:
    """Set attributes for a while, past a class that forbids it."""
    import msgspec

    put = msgspec.structs.force_setattr if isinstance(thing, msgspec.Struct) else object.__setattr__
    old = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        put(thing, name, value)
    try:
        yield
    finally:
        for name, value in old.items():
            put(thing, name, value)


def calls_outside_a_break(rank: Rank) -> dict[str, str]:
    """Two-batch overlap's operators, and a direct call, inside a segment; then as usual."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    x, weights, ids, *_ = rank.inputs(1)
    layer, top = rank.layers[1], StandardTopKOutput(weights, ids, None)

    class State(dict):  # type: ignore[type-arg]
        __getattr__ = dict.__getitem__

    def operator() -> None:
        state = State(hidden_states_mlp_input=x, topk_output=top, tbo_subbatch_index=0)
        DeepseekV2MoE.op_dispatch_a(SimpleNamespace(ep_size=WORLD, experts=layer), state)

    def text(call: Callable[[], Any]) -> str:
        with rank.capturing():
            return ended(call)[0]

    got = {"operator": text(operator), "direct": text(lambda: layer.dispatcher.dispatch(hidden_states=x, topk_output=top))}
    rank.eager(1)  # the dispatcher is as it was
    return got


def shared_experts(rank: Rank) -> dict[str, Any]:
    """The host's ``forward_deepep`` in a capture: no stream forked, and given back, also after an error."""
    import torch
    from sglang.srt.layers.moe.topk import StandardTopKOutput
    from sglang.srt.models.deepseek_v2 import DeepseekV2MoE

    class Touched(Exception):
        pass

    class Stream:
        def __getattr__(self, name: str) -> Any:
            raise Touched(name)

    stream, layer = Stream(), rank.layers[0]
    x, weights, ids, *_ = rank.inputs(1)

    def moe(shared: Callable[[Any], Any]) -> Any:
        return SimpleNamespace(
            alt_stream=stream, _fuse_shared_experts_inside_sbo=False, is_nextn=True, num_fused_shared_experts=0,
            gate=lambda x, **kw: x, topk=lambda *a, **kw: StandardTopKOutput(weights, ids, None), experts=layer,
            _forward_shared_experts=shared, routed_scaling_factor=2.0, routed_scaling_factor_fused_in_topk=False,
            layer_id=layer.layer_id,
        )  # fmt: skip

    def broken(x: Any) -> Any:
        raise ZeroDivisionError

    batch = SimpleNamespace(num_token_non_padded=None)
    sound, failing = moe(lambda x: x * 0.25), moe(broken)
    with rank.capturing() as graph:
        result = DeepseekV2MoE.forward_deepep(sound, x, batch)
    graph.replay()
    try:
        with rank.capturing():
            DeepseekV2MoE.forward_deepep(failing, x, batch)
    except ZeroDivisionError:
        pass
    try:
        DeepseekV2MoE.forward_deepep(sound, x, batch)
        outside = "not forked"
    except Touched as touched:
        outside = f"forked by {touched}"
    from sglang.srt.layers.dp_attention import set_is_extend_in_batch

    set_is_extend_in_batch(True)
    routed = layer(x, StandardTopKOutput(weights, ids, None))
    return {
        "equal": torch.equal(result, (x * 0.25).add_(routed, alpha=2.0)),
        "restored": [sound.alt_stream is stream, failing.alt_stream is stream],
        "outside": outside,
    }


def names_and_kinds(rank: Rank) -> dict[str, Any]:
    """Where the host looks our class up: a scheme by class name, DeepGEMM and models by ``isinstance``."""
    from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE
    from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

    args = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
    activations = {**args, "strategy": "token", "dynamic": True}
    config = CompressedTensorsConfig.from_config({
        "format": "float-quantized", "ignore": [],
        "config_groups": {"g": {"targets": ["Linear"], "weights": args, "input_activations": activations}},
    })  # fmt: skip
    config._add_fused_moe_to_target_scheme_map()
    layer = rank.layers[0]
    for stock in ("FusedMoE", "Linear"):
        del config.target_scheme_map[stock]  # what would match without the name
    found = config.get_scheme_dict(layer, "model.layers.3.mlp.experts")
    return {
        "scheme": found is config.target_scheme_map["DeepEPMoE"], "isinstance": isinstance(layer, DeepEPMoE),
        "ours": type(layer) is not DeepEPMoE, "mapping": len(type(layer).make_expert_params_mapping("g", "d", "u", EXPERTS)),
    }  # fmt: skip


def a_rank_that_is_late(rank: Rank) -> dict[str, Any]:
    """Each rank in turn does not come to the barrier; a group for each, since a broken wait spoils its group."""
    import torch

    from sglang_bcg_dsa.backends.deepep import named_barrier

    groups = [torch.distributed.new_group(backend="gloo") for _ in range(WORLD)]
    current: list[Any] = []
    barrier = named_barrier(lambda: SimpleNamespace(world_size=WORLD, ranks=range(WORLD), cpu_group=current[-1]), LATE_S)
    got: dict[str, Any] = {}
    for absent in range(WORLD):
        current.append(groups[absent])
        if rank.rank == absent:
            time.sleep((2 + absent) * LATE_S)  # the second, who has waited, later than the first
        outcome = ended(barrier)  # the late one's own is of no interest
        if rank.rank != absent:
            got[f"without {absent}"] = outcome
    return got


def a_rank_that_dies(rank: Rank) -> Any:
    """Rank 1 ends while rank 0 waits for it before a break. Last, for the same reason."""
    return None if rank.rank else ended(rank.capture)


def ended(call: Callable[[], Any]) -> tuple[str, float]:
    """The error that a call ended with, and after how many seconds."""
    start = time.perf_counter()
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.perf_counter() - start
    return "not refused", time.perf_counter() - start


def votes(rank: Rank) -> list[Any]:
    """Random steps over the host's own gather and group: what each rank makes of each step, and replays."""
    import random

    from sglang.srt.distributed.parallel_state import get_tp_group
    from sglang.srt.managers.scheduler_components.dp_attn import MLPSyncBatchInfo
    from sglang.srt.model_executor.forward_batch_info import ForwardMode

    from tests.test_adapters import BALLOT, FLAG, LADDER, forward_batch, make_row, schedule_batch
    from tests.test_adapters import Rank as Voter

    voter = Voter(rank.rank, world=WORLD)
    draw = random.Random(5)
    said = []
    for _ in range(STEPS):
        drawn = [
            (draw.choice(["idle", "extend", "extend", "decode", "mixed", "embeds", "prefix"]), draw.randint(1, 150))
            for _ in range(WORLD)
        ]
        kind, tokens = drawn[rank.rank]
        facts: dict[str, Any] = {"embeds": {"input_embeds": object()}, "prefix": {"prefix_lens": [3]}}.get(kind, {})
        mode = {"decode": ForwardMode.DECODE, "mixed": ForwardMode.MIXED}.get(kind, ForwardMode.EXTEND)
        batch = None if kind == "idle" else schedule_batch(tokens, mode, **facts)
        prefill = batch is not None and mode.is_extend()
        # The host votes no for a decode batch.
        info = make_row(WORLD, tokens if batch else 0, prefill, kind != "decode")

        def gather(adapter: Any, local: Any, info: Any = info) -> None:
            voter.feature.on_gather(MLPSyncBatchInfo.all_gather, info, "cpu", get_tp_group().cpu_group)

        voter.seen.verdicts.clear()
        voter.feature.on_batch(gather, None, batch)
        verdict = voter.seen.verdicts[-1] if voter.seen.verdicts else None
        agreed = bool(getattr(info, BALLOT))
        replay = None
        if verdict is not None and (prefill or verdict.replay):
            run = verdict.bucket or (tokens if batch else max(info.global_num_tokens))
            counts = [max(info.global_num_tokens)] * WORLD if agreed else info.global_num_tokens
            forward = forward_batch(run, counts, agreed, **({"forward_mode": mode} if prefill else {}))
            if kind == "prefix":
                forward.extend_prefix_lens_cpu = [3]
            assert bool(getattr(forward, FLAG)) == agreed
            replay = voter.decide(forward)
        said.append([verdict and [verdict.replay, verdict.bucket, [[v.tokens, v.against] for v in verdict.votes]],
                     agreed, replay, prefill])  # fmt: skip
    assert LADDER
    return said


CHECKS = (
    a_rank_that_is_late, replay_equals_eager, host_mode_is_restored, recorder_counts, refusals, calls_outside_a_break,
    shared_experts, names_and_kinds, rebalance, stale_map, votes, a_rank_that_dies,
)  # fmt: skip


# --- processes ----------------------------------------------------------------------------------


def start_host(rank: int, rendezvous: str) -> None:
    """The host's groups and flags as its scheduler and model runner set them up, for DeepEP on the CPU."""
    import torch
    from sglang.srt.distributed import parallel_state
    from sglang.srt.eplb.expert_location import set_global_expert_location_metadata
    from sglang.srt.layers.moe import initialize_moe_config
    from sglang.srt.runtime_context import get_parallel

    from sglang_bcg_dsa.testing import deep_ep_gloo, deep_ep_overrides

    torch.set_num_threads(1)
    parallel_state.init_distributed_environment(
        world_size=WORLD, rank=rank, local_rank=rank, distributed_init_method=f"file://{rendezvous}", backend="gloo", timeout=30
    )
    if hasattr(get_parallel(), "override_permanently"):
        get_parallel().override_permanently(
            tp_rank=rank, attn_tp_rank=rank, moe_ep_size=WORLD, moe_ep_rank=rank, moe_tp_size=1, moe_tp_rank=0
        )
        parallel_state.initialize_model_parallel(backend="gloo")
        initialize_moe_config()
    else:
        from sglang.srt.runtime_context import get_server_args

        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=WORLD, expert_model_parallel_size=WORLD, backend="gloo"
        )
        initialize_moe_config(get_server_args())
    set_global_expert_location_metadata(location(torch.tensor([[0, 1, 2, 3, 0, 1]] * 5), rank))
    deep_ep_gloo.capturing = deep_ep_overrides.tape_is_recording


def install() -> None:
    """The plugin's hooks and the overrides of the CPU, through the host's registry."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from sglang_bcg_dsa.config import Config, Moe
    from sglang_bcg_dsa.hooks.moe import MoeFeature
    from sglang_bcg_dsa.installer import Installer
    from sglang_bcg_dsa.reasons import ReasonTable
    from sglang_bcg_dsa.seams import examine
    from sglang_bcg_dsa.testing import deep_ep_overrides, overrides
    from sglang_bcg_dsa.testing.settings import TapeSettings

    overrides.apply(TapeSettings(tape=True), overrides.OVERRIDES)
    deep_ep_overrides.register()
    seams = examine()
    installer = Installer(seams)
    config = Config(moe=Moe(barrier_seconds=BARRIER_S))
    MoeFeature().bcg_install(config=config, seams=seams, reasons=ReasonTable(), installer=installer)
    HookRegistry.apply_hooks()
    installer.verify()


def rank_main(number: int, rendezvous: str, pipe: Any) -> None:
    results: dict[str, Any] = {}
    try:
        start_host(number, rendezvous)
        rank = Rank(number)
        for check in CHECKS:
            try:
                results[check.__name__] = check(rank)
            except Exception:
                results[check.__name__] = traceback.format_exc()
    except Exception:
        results["start"] = traceback.format_exc()
    pipe.send(results)


def main(folder: str, model: str) -> None:
    from sglang.srt.server_args import prepare_server_args

    from sglang_bcg_dsa.testing import deep_ep_folder

    args = prepare_server_args([
        "--model-path", model, "--device", "cpu", "--skip-tokenizer-init", "--load-format", "dummy", "--tp", str(WORLD),
        "--deepep-mode", "auto", *deep_ep_folder.SERVER_ARGS,
    ])  # fmt: skip
    from sglang.srt.runtime_context import get_context

    get_context().set_server_args(args)
    install()
    fork = multiprocessing.get_context("fork")
    pipes, processes = [], []
    for number in range(WORLD):
        here, there = fork.Pipe()
        process = fork.Process(target=rank_main, args=(number, str(Path(folder) / "rendezvous"), there), daemon=True)
        process.start()
        there.close()
        pipes.append(here)
        processes.append(process)
    results = [pipe.recv() if pipe.poll(90) else {"start": "does not answer"} for pipe in pipes]
    for process in processes:
        process.kill()
    print("RESULT " + json.dumps({name: [r.get(name) for r in results] for name in {k for r in results for k in r}}))


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    main(*sys.argv[1:])
