"""Builtin feature ``moe``: the DeepEP MoE break, on hosts that do not have one.

Contract: models get a subclass of the host's DeepEPMoE from ``get_moe_impl_class``; see
:mod:`sglang_bcg_dsa.backends.deepep` for what it does. A host with its own break keeps it.
"""

from __future__ import annotations

import weakref
from typing import Any

from sglang_bcg_dsa.config import Config
from sglang_bcg_dsa.hooks import hookimpl
from sglang_bcg_dsa.installer import Installer
from sglang_bcg_dsa.reasons import ReasonTable
from sglang_bcg_dsa.records import Feature, State
from sglang_bcg_dsa.seams import SeamSet, resolve, resolve_owner


class MoeFeature:
    """Hands models our DeepEPMoE."""

    name = "moe"

    @hookimpl
    def bcg_feature(self, config: Config, seams: SeamSet) -> Feature:
        if "moe.native" in seams:
            return Feature(self.name, State.NATIVE, "SGLang has a DeepEP MoE break of its own")
        return Feature(self.name, State.SUPPLIED, "SGLang would capture DeepEP's dispatch, which never ends")

    @hookimpl
    def bcg_install(self, config: Config, seams: SeamSet, reasons: ReasonTable, installer: Installer) -> None:
        self._seams = seams
        self._seconds = config.moe.barrier_seconds
        self._class: type | None = None
        self._layers: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        installer.after("moe.choose", self.on_choose)
        installer.around("moe.shared", self.on_shared)
        installer.around("moe.dispatcher", self.on_dispatcher)

    def on_choose(self, result: type, *args: Any, **kwargs: Any) -> type | None:
        """Replace the host's DeepEPMoE, and only it, by our subclass."""
        if result is not resolve_owner(self._seams["moe.impl"]):
            return None
        if self._class is None:
            from sglang_bcg_dsa.backends import deepep

            recorder = resolve(self._seams["moe.recorder"])
            silenced = self._seams.field("moe.recorder.off")
            call = deepep.make_break(
                resolve(self._seams["moe.topk"]),
                resolve(self._seams["moe.get_mode"]),
                resolve(self._seams["moe.set_mode"]),
                recorder,
                deepep.named_barrier(resolve(self._seams["moe.group"]), self._seconds),
            )
            parallel = resolve(self._seams["parallel"])
            refusal = deepep.refusals(
                resolve(self._seams["moe.overlap"]),
                lambda: int(parallel().attn_tp_size),
                resolve(self._seams["moe.args"]),
            )
            # A recorder that is off altogether has no such switch.
            self._class = deepep.with_break(
                result, call, refusal, lambda: not getattr(recorder(), silenced, True), self._layers
            )
        return self._class

    def on_shared(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The shared experts' stream is joined inside the segment."""
        from sglang_bcg_dsa.backends.deepep import single_stream

        return single_stream(original, *args, **kwargs)

    def on_dispatcher(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """No dispatch while a segment is captured, whoever calls it."""
        from sglang_bcg_dsa.backends.deepep import only_in_breaks

        return only_in_breaks(self._layers, original, *args, **kwargs)
