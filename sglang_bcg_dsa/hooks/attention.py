"""Builtin feature ``attention``: DSA and DSV4 prefill graphs, and what captured kernels read of a batch.

Contract: DeepSeek-V4 gets a subclass of the host's backend from the registry, on every host; see
:mod:`sglang_bcg_dsa.backends.dsv4`. Where the host drops what its graphs read (before 0.5.17), so do
models with DeepSeek sparse attention, under both names of their backend; see
:mod:`sglang_bcg_dsa.backends.dsa`. There, for every model, the tensors of a captured batch live as
long as the graphs that read them, and the count of real tokens that masks padded rows is this rank's.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sglang_bcg_dsa.config import Config
from sglang_bcg_dsa.errors import StartupError
from sglang_bcg_dsa.hooks import hookimpl
from sglang_bcg_dsa.hostfacts import is_idle
from sglang_bcg_dsa.installer import Installer
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Feature, State
from sglang_bcg_dsa.seams import SeamSet, resolve

logger = logging.getLogger(__name__)

_NAMES = ("dsa", "nsa")


class AttentionFeature:
    """Registers the DSA backend; keeps and corrects what captured kernels read."""

    name = "attention"

    def __init__(self) -> None:
        self._dsv4: Any = None

    @hookimpl
    def bcg_feature(self, config: Config, seams: SeamSet) -> Feature:
        if "attention.native" in seams:
            return Feature(self.name, State.EXTENDED, "DSV4 graphs hold no scores and no wide tables; DSA is left to SGLang")
        return Feature(self.name, State.SUPPLIED, "SGLang drops what its graphs read; DSA attention joins the graphs")

    @hookimpl
    def bcg_install(self, config: Config, seams: SeamSet, reasons: ReasonTable, installer: Installer) -> None:
        self._seams = seams
        self._parallel = resolve(seams["parallel"])
        self._attend: Any = None
        resolve(seams["dsv4.register"])("dsv4")(self.make_dsv4)
        installer.around("dsv4.attend", self.on_attend)
        if "dsv4.budget" in seams:
            installer.around("dsv4.budget", self.on_budget)
        installer.after("dsv4.built", self.on_dsv4_built)
        if "attention.native" in seams:
            return
        self._select: Any = None
        self._class: type | None = None
        self._told = False
        self._kept: list[Any] = []
        register = resolve(seams["attention.register"])
        for name in _NAMES:
            register(name)(self.make_backend)
        installer.after("attention.kept", self.on_capture_prepare)
        installer.after("attention.load", self.on_load_batch)
        installer.around("attention.indexer", self.on_indexer)
        installer.around("attention.core", self.on_core)
        installer.around("attention.fuse", self.on_fuse)
        installer.after("attention.built", self.on_built)

    # ------------------------------------------------------------------ the backend

    def make_backend(self, model_runner: Any) -> Any:
        """What SGLang's registry calls for a DSA model."""
        from sglang_bcg_dsa.backends import dsa

        if self._class is None:
            self._class = dsa.with_replay(resolve(self._seams["attention.dsa"]), resolve(self._seams["attention.metadata"]))
        return self._class(model_runner)

    def on_built(self, result: Any, runner: Any, model_runner: Any) -> None:
        """A prefill runner captured its graphs: the registry must have handed out our backend."""
        # A draft's backend is built past the registry.
        backend = model_runner.attn_backend
        if model_runner.is_draft_worker:
            return
        if type(backend).__name__ == "DeepseekSparseAttnBackend" and not hasattr(backend, "replays_any_prefix"):
            raise StartupError(
                "the DSA attention backend is SGLang's own: another plugin registered 'dsa' after this one; "
                "take it out, or set [attention] enabled = false"
            )

    # ------------------------------------------------------------------ DSV4

    def make_dsv4(self, model_runner: Any) -> Any:
        """What SGLang's registry calls for a DSV4 model."""
        from sglang_bcg_dsa.backends import dsv4

        built = resolve(self._seams["dsv4.create"])(model_runner)
        host = resolve(self._seams["dsv4.backend"])
        why = "prefills are split over ranks" if self._parallel().attn_cp_size > 1 else dsv4.why_left_alone(built, host)
        if why is not None:
            logger.info("sglang-bcg-dsa: DSV4 prefill graphs are left to SGLang: %s", why)
            return built
        metadata, core, plan = (resolve(self._seams[f"dsv4.{part}"]) for part in ("metadata", "core", "plan"))
        online = bool(resolve(self._seams["dsv4.online"])(128))
        captured = dsv4.contract(metadata, core, plan, online=online)
        # Without a GPU there is no kernel to write tables with; online compression plans on the host.
        make_tables = self.make_tables if built.req_to_token.is_cuda and not online else None
        cls = dsv4.with_replay(host, captured, self._seams.field("dsv4.real_tokens"), online, make_tables)
        self._dsv4 = cls(model_runner)
        return self._dsv4

    @hookimpl
    def bcg_state(self) -> dict[str, Any] | None:
        """Who builds DSV4's tables: ``one kernel``, or ``SGLang`` with what the kernel got wrong."""
        return None if self._dsv4 is None else {"dsv4_tables": self._dsv4.tables_by}

    def make_tables(self, backend: Any, metadata: Any) -> Any:
        """What writes the tables of DSV4 prefills; ``metadata``: SGLang's own of a made-up batch."""
        from sglang_bcg_dsa.backends.dsv4_tables import Tables

        return Tables(metadata, backend.token_to_kv_pool, resolve(self._seams["dsv4.schedule"]))

    def on_attend(
        self, original: Callable[..., None], query: Any, key_value: Any, output: Any, layer_id: int, compress_ratio: int,
        attn_sink: Any, save_kv_cache: bool,
    ) -> None:  # fmt: skip
        """A DSV4 layer's break: ours does what the layer left to it, and defines the padded rows."""
        from sglang_bcg_dsa.backends import dsv4
        from sglang_bcg_dsa.engine import host_break

        get_backend = resolve(self._seams["dsv4.current"])
        backend = get_backend()
        if not (hasattr(backend, "selects_in_breaks") and backend.in_prefill_graph()):
            return original(query, key_value, output, layer_id, compress_ratio, attn_sink, save_kv_cache)
        if self._attend is None:
            body = dsv4.Attention(resolve(self._seams["dsv4.body"]), resolve(self._seams["dsv4.context"]), get_backend)
            self._attend = host_break(body.attend)
        left = backend.take(layer_id, compress_ratio)
        self._attend(query, key_value, output, layer_id, compress_ratio, attn_sink, save_kv_cache, **left)
        return None

    def on_budget(self, original: Callable[..., int | None], metadata: Any, *, num_rows: int) -> int | None:
        """The bytes that one chunk of scores may take. SGLang has none in a breakable region: it scores in the graph there."""
        from sglang_bcg_dsa.engine import in_breakable_region

        found = original(metadata, num_rows=num_rows)
        if found is not None or metadata.use_prefill_cuda_graph or not in_breakable_region():
            return found
        device, columns = metadata.compressed_seq_lens.device, metadata.max_compressed_seq_len
        if device.type != "cuda" or not resolve(self._seams["dsv4.budget.asked"])(num_rows=num_rows, num_cols=columns):
            return None
        return int(resolve(self._seams["dsv4.budget.bytes"])(device_index=device.index))

    def on_dsv4_built(self, result: Any, runner: Any, model_runner: Any) -> None:
        """A prefill runner captured its graphs: the registry must have asked us for the backend."""
        from sglang_bcg_dsa.backends import dsv4

        backend, host = model_runner.attn_backend, resolve(self._seams["dsv4.backend"])
        if self._parallel().attn_cp_size == 1 and type(backend) is host and dsv4.why_left_alone(backend, host) is None:
            raise StartupError(
                "the DSV4 attention backend is SGLang's own: another plugin registered 'dsv4' after this one; "
                "take it out, or set [attention] enabled = false"
            )

    # ------------------------------------------------------------------ a DSA layer in a breakable region

    def on_indexer(self, original: Callable[..., None], **call: Any) -> None:
        """The host's indexer break: run most of it in the segment, only the selection as a break."""
        from sglang_bcg_dsa.backends import dsa

        context = resolve(self._seams["attention.context"])()
        indexer, topk = context.dsa_indexers[call["layer_id"]], call["topk_result"]
        pool = resolve(self._seams["attention.backend"])().token_to_kv_pool
        if topk.numel() == 0 or dsa.why_indexer_not_split(indexer, pool) is not None:
            return original(**call)
        if self._select is None:
            self._select = dsa.make_break(
                dsa.Selection(resolve(self._seams["attention.context"]), resolve(self._seams["attention.backend"]))
            )
        q_fp8, weights = dsa.project_and_store(
            indexer, context.forward_batch, call["layer_id"], call["x"], call["q_lora"], call["positions"],
            resolve(self._seams["attention.quantise"]),
        )  # fmt: skip
        self._select(topk, indexer, call["layer_id"], q_fp8, weights)
        return None

    def on_core(self, original: Callable[..., Any], layer: Any, *args: Any, **kwargs: Any) -> Any:
        """Attention over the selected slots: captured instead of a break, where it can be."""
        inline: AbstractContextManager[Any] = nullcontext()
        if self._captured(layer):
            inline = resolve(self._seams["attention.inline"])()
        with inline:
            return original(layer, *args, **kwargs)

    def on_fuse(self, original: Callable[..., bool], layer: Any, *args: Any, **kwargs: Any) -> bool:
        """The host folds a matrix product into its attention break; without that break it stays outside."""
        return not self._captured(layer) and bool(original(layer, *args, **kwargs))

    def _captured(self, layer: Any) -> bool:
        from sglang_bcg_dsa.backends import dsa
        from sglang_bcg_dsa.engine import in_breakable_region

        if not in_breakable_region() or not layer.use_dsa:
            return False
        backend = resolve(self._seams["attention.backend"])()
        args = resolve(self._seams["attention.arguments"])()
        waited_for = args.enable_hierarchical_cache or args.enable_flexkv or args.enable_lmcache
        why = dsa.why_not_captured(backend, bool(waited_for or args.radix_cache_backend is not None))
        if why is None:
            backend.attention_is_captured = True
        if not self._told:
            self._told = True
            logger.info("sglang-bcg-dsa: sparse attention is %s", "captured" if why is None else f"a break: {why}")
        return why is None

    # ------------------------------------------------------------------ what captured kernels read

    def on_capture_prepare(self, result: Any, runner: Any, num_tokens: int) -> None:
        """Captured kernels read the batch's tensors by address, and the host drops the batch."""
        self._kept.append(result)

    def on_load_batch(self, result: Any, runner: Any, forward_batch: Any, **kwargs: Any) -> None:
        """The count that masks padded rows, for this attention-TP rank's share of the bucket.

        The host computed it for the unpadded length: with two ranks and 20 tokens in a bucket of 32
        the first would mask rows 10 to 15, which are real. A rank without a batch runs a made-up
        one, of which no row is real; counting its rows would send them through the experts of all.
        """
        registry = runner.buffer_registry
        if not registry.has_slot("num_token_non_padded"):
            return
        split, rank = 1, 0
        if runner.require_mlp_tp_gather or runner.require_attn_tp_gather:
            split, rank = self._parallel().attn_tp_size, self._parallel().attn_tp_rank
        real = 0 if is_idle(forward_batch) else forward_batch.num_token_non_padded_cpu
        share = len(result.input_ids) // split
        registry.get_slot("num_token_non_padded").buffer.fill_(local_tokens(real, share, rank))


def local_tokens(real: int, share: int, rank: int) -> int:
    """How many of ``real`` tokens lie in the rows of attention-TP rank ``rank``, each having ``share`` rows."""
    return min(max(real - share * rank, 0), share)

