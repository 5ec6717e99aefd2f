"""CPU kernels of the CPU platform: what the host has for the GPU only, or not in a capturable form.

Everything here is capture-safe: no value of a tensor is read by Python.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sglang_bcg_dsa.testing.tape import allow_host_reads

# Rows a matrix product is done in. BLAS picks other kernels for few rows (on AVX-512: below 16),
# and then a row's result depends on how many rows came with it. With blocks of one size it does
# not.
ROW_BLOCK = 32


def invariant_bmm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for ``[batch, m, k] @ [batch, k, n]``; a row's result does not depend on ``m``.

    Floating-point products are summed in double precision, where a product of two floats is
    exact, and rounded once. So a padded bucket gives bit for bit what the unpadded batch gives.
    The residue is a row which lands in another place of its block: it may differ in the last bit,
    once in some 10**8.
    """
    batch, m, k = a.shape
    n = b.shape[2]
    wide = torch.float64 if a.is_floating_point() else a.dtype
    blocks = -(-m // ROW_BLOCK)
    rows = torch.zeros(batch, blocks * ROW_BLOCK, k, dtype=wide)
    rows[:, :m] = a
    rows = rows.view(batch * blocks, ROW_BLOCK, k)
    columns = b.to(wide)
    if blocks != 1:
        columns = columns.repeat_interleave(blocks, dim=0)
    # baddbmm, because mm, addmm and bmm themselves end up here.
    out = torch.baddbmm(rows.new_zeros(()), rows, columns, beta=0)
    return out.view(batch, blocks * ROW_BLOCK, n)[:, :m].to(a.dtype)


def invariant_mm(a: Tensor, b: Tensor) -> Tensor:
    """``a @ b`` for matrices, with `invariant_bmm`'s promise."""
    return invariant_bmm(a[None], b[None])[0]


def invariant_addmm(
    bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """``beta * bias + alpha * (a @ b)``, with `invariant_bmm`'s promise."""
    product = invariant_mm(a, b)
    return product * alpha + bias * beta if (alpha, beta) != (1, 1) else product + bias


def into_out(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """The ``out=`` form of ``kernel``."""
    return lambda *args, out, **kwargs: out.copy_(kernel(*args, **kwargs))


def on_cpu_too(qualified_name: str) -> Callable[..., Any]:
    """A CPU kernel for an operator whose Python function was registered for an accelerator only."""
    namespace, name = qualified_name.split("::")
    operator = getattr(getattr(torch.ops, namespace), name).default
    for key in ("PrivateUse1", "CUDA"):
        if torch._C._dispatch_has_kernel_for_dispatch_key(qualified_name, key):
            keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))
            return lambda *args, **kwargs: operator.redispatch(keys, *args, **kwargs)
    raise LookupError(f"{qualified_name} has no accelerator kernel to run on the CPU")


def operator(*mutates: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function of tensors one operator, which writes the arguments named in ``mutates``.

    To a tape it is what a kernel is to a graph: opaque, and run again at each replay. So it may
    look at values.
    """

    def make(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            with allow_host_reads("an operator: it reads again at each replay"):
                return kernel(*args, **kwargs)

        name = f"sglang_bcg_dsa_testing::{kernel.__name__.strip('_')}"
        schema = torch.library.infer_schema(kernel, mutates_args=mutates)
        return torch.library.custom_op(name, run, mutates_args=mutates, schema=schema)

    return make


def copy_rows(
    dst: Tensor, src: Tensor, dim: int, offset: Tensor, sz: Tensor, offset_src: bool
) -> None:
    """Copy ``sz`` rows between a rank's tensor and the gathered one, at ``offset`` of the latter.

    ``offset_src`` says which of the two is the gathered one. ``offset`` and ``sz`` stay tensors:
    they change from replay to replay.
    """
    if dim != 0:
        raise NotImplementedError(f"copy_rows along dimension {dim}")
    row = torch.arange(dst.shape[0])
    if offset_src:
        source, wanted = row + offset, row < sz
    else:
        source, wanted = row - offset, (row >= offset) & (row < offset + sz)
    wanted = wanted & (source >= 0) & (source < src.shape[0])
    picked = src[source.clamp(0, max(src.shape[0] - 1, 0))]
    dst.copy_(torch.where(wanted.view(-1, *[1] * (dst.dim() - 1)), picked, dst))


def mixture_of_experts(x: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor) -> Tensor:
    """SwiGLU experts for ``x`` [tokens, hidden], without counting tokens per expert on the host.

    ``ids`` [tokens, k] selects experts; a negative id (an expert of another rank, a padded row)
    contributes nothing.
    """
    local = ids >= 0
    chosen = ids.clamp(min=0).long()
    gate, up = torch.einsum("ti,tkoi->tko", x, w13[chosen]).chunk(2, dim=-1)
    out = torch.einsum("tko,tkho->tkh", torch.nn.functional.silu(gate) * up, w2[chosen])
    return (out * weights.masked_fill(~local, 0).to(out.dtype)[..., None]).sum(dim=1)
