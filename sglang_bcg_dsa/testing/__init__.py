"""Run SGLang's real prefill-graph machinery on a machine without a GPU.

`TapeGraph` stands in for ``torch.cuda.CUDAGraph``; `platform` lets the real SGLang server run on
the CPU; `server` starts one. Nothing here is active in a server that did not ask for it, and
importing this package imports neither torch nor sglang: the names below are loaded when first
used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_bcg_dsa.testing.tape import (
        HostReadDuringCapture,
        TapeError,
        TapeGraph,
        allow_host_reads,
    )

__all__ = ["HostReadDuringCapture", "TapeError", "TapeGraph", "allow_host_reads"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from sglang_bcg_dsa.testing import tape

    return getattr(tape, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
