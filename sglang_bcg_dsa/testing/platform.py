"""An out-of-tree SGLang platform: this machine's CPU, with torch's native operators.

Two entry points, both named `NAME`: `activate` (group ``sglang.srt.platforms``) and `register`
(group ``sglang.srt.plugins``). They are not in this package's metadata, where SGLang would offer
them to every server: `write_distribution` makes a metadata folder to put on ``PYTHONPATH`` of the
processes that want them, together with ``SGLANG_PLATFORM=bcg_tape_cpu``.
"""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import sys
from pathlib import Path
from typing import Any

from sglang_bcg_dsa.testing import dsa_folder, metadata_folder
from sglang_bcg_dsa.testing.settings import TapeSettings

NAME = "bcg_tape_cpu"
DISTRIBUTION = "sglang-bcg-dsa-tape-cpu"


def activate() -> str:
    """Entry point of ``sglang.srt.platforms``: where the platform class is."""
    return f"{__name__}:TapeCpuPlatform"


def register() -> None:
    """Entry point of ``sglang.srt.plugins``: `SystemExit` when the platform cannot be set up.

    Anything less SGLang would log and swallow, and serve a half-patched model.
    """
    try:
        _register()
    except Exception as error:
        raise SystemExit(
            f"sglang_bcg_dsa.testing: the CPU platform cannot be set up: {error!r}"
        ) from error


def _register() -> None:
    from sglang_bcg_dsa.testing import overrides

    settings = TapeSettings.from_env()
    _offer_attention_backend(overrides.BACKEND)
    sparse = dsa_folder.is_on_the_path()
    if sparse:
        from sglang_bcg_dsa.testing import dsa_overrides

        overrides.apply(settings, dsa_overrides.IN_EVERY_PROCESS)
    # The launching process only parses arguments; hooking there would import the model code for
    # nothing. A child has imported the scheduler already if it is to run one.
    if (
        multiprocessing.parent_process() is not None
        and "sglang.srt.managers.scheduler" in sys.modules
    ):
        overrides.apply(settings, overrides.OVERRIDES)
        if sparse:
            overrides.apply(settings, dsa_overrides.IN_SCHEDULERS)
        from sglang_bcg_dsa.testing import deep_ep_overrides

        if deep_ep_overrides.wanted():
            deep_ep_overrides.register()


def _offer_attention_backend(name: str) -> None:
    from sglang.srt import server_args

    if name in server_args.ATTENTION_BACKEND_CHOICES:
        return
    # 0.5.16 has it with the arguments, later releases with the choices.
    has_it = hasattr(server_args, "add_attention_backend_choices")
    module = "server_args" if has_it else "arg_groups.choices"
    importlib.import_module(f"sglang.srt.{module}").add_attention_backend_choices([name])


@functools.cache
def _platform_class() -> Any:
    from sglang.srt.platforms.cpu import CpuDeviceMixin
    from sglang.srt.platforms.device_mixin import PlatformEnum
    from sglang.srt.platforms.interface import SRTPlatform

    from sglang_bcg_dsa.testing.overrides import BACKEND

    class TapeCpuPlatform(CpuDeviceMixin, SRTPlatform):  # type: ignore[misc]
        """Out of tree, so that the host neither looks for its CPU kernels nor for vLLM's."""

        _enum = PlatformEnum.OOT
        device_name = device_type = "cpu"

        def get_default_attention_backend(self) -> str:
            return BACKEND

        def get_dispatch_key_name(self) -> str:
            return "native"

        def is_pin_memory_available(self, device: Any = None) -> bool:
            return False

    if hasattr(SRTPlatform, "get_kv_pool_cls"):
        return TapeCpuPlatform

    class TapeCpuPlatformWithPools(TapeCpuPlatform):
        """For hosts (0.5.16) that ask an out-of-tree platform for each pool."""

        def get_mha_kv_pool_cls(self) -> Any:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_mla_kv_pool_cls(self) -> Any:
            from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

            class Pool(MLATokenToKVPool):  # type: ignore[misc]
                """The host hands an out-of-tree pool one argument more than its own pool takes."""

                def __init__(self, *args: Any, index_head_dim: None, **kwargs: Any) -> None:
                    super().__init__(*args, **kwargs)

            return Pool

        def get_dsa_kv_pool_cls(self) -> Any:
            from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

            return DSATokenToKVPool

        def get_paged_allocator_cls(self) -> Any:
            import torch
            from sglang.srt.mem_cache.allocator import (
                PagedTokenToKVPoolAllocator,
                alloc_extend_naive,
            )
            from sglang.srt.mem_cache.allocator.swa import SWATokenToKVPoolAllocator
            from sglang.srt.mem_cache.base_swa_memory_pool import BaseSWAKVPool

            class Allocator(PagedTokenToKVPoolAllocator):  # type: ignore[misc]
                """The host's own takes slots with Triton; later hosts have this form as well."""

                free_pages: Any

                def alloc_extend(
                    self,
                    prefix_lens: Any,
                    prefix_lens_cpu: Any,
                    seq_lens: Any,
                    seq_lens_cpu: Any,
                    last_loc: Any,
                    extend_num_tokens: int,
                    num_new_pages: int | None = None,
                ) -> Any:
                    size = self.page_size
                    used = int((-(-seq_lens // size) + -prefix_lens // size).sum())
                    if used > len(self.free_pages):
                        return None
                    slots = last_loc.new_empty(extend_num_tokens, dtype=torch.int64)
                    alloc_extend_naive(
                        prefix_lens, seq_lens, last_loc, self.free_pages, slots, size, self.device
                    )
                    self.free_pages = self.free_pages[used:]
                    return slots

                def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Any:
                    before, count = seq_lens - 1, len(seq_lens)
                    return self.alloc_extend(before, None, seq_lens, None, last_loc, count)

            class WindowAllocator(SWATokenToKVPoolAllocator):  # type: ignore[misc]
                """The host's own makes the two it is composed of from its Triton class."""

                def __init__(self, size: int, *, kvcache: Any, **kwargs: Any) -> None:
                    super().__init__(size, kvcache.swa_size, kvcache=kvcache, **kwargs)
                    self.full_attn_allocator = Allocator(size, kvcache=None, **kwargs)
                    self.swa_attn_allocator = Allocator(kvcache.swa_size, kvcache=None, **kwargs)

            def allocator(size: int, *, kvcache: Any, **kwargs: Any) -> Any:
                windowed = isinstance(kvcache, BaseSWAKVPool)
                return (WindowAllocator if windowed else Allocator)(size, kvcache=kvcache, **kwargs)

            return allocator

    return TapeCpuPlatformWithPools


def __getattr__(name: str) -> Any:
    if name == "TapeCpuPlatform":
        return _platform_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def write_distribution(directory: Path) -> Path:
    """Write the metadata folder into ``directory`` (to go on ``PYTHONPATH``) and return its path."""
    return metadata_folder.write(
        directory,
        DISTRIBUTION,
        {
            "sglang.srt.platforms": {NAME: f"{__name__}:activate"},
            "sglang.srt.plugins": {NAME: f"{__name__}:register"},
        },
    )
