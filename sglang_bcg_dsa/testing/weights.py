"""Seeded dummy weights under which a wrong layer, rank or token shows.

The host's dummy weights are so small that each layer vanishes in rounding, and are the same on all
ranks. These keep activations near one, and differ from shard to shard: what a rank holds a share
of is seeded with its rank, what is replicated is not. A model is therefore a function of its
parallelism: compare servers of equal parallelism only.
"""

from __future__ import annotations

import multiprocessing
import zlib
from pathlib import Path
from typing import Any

import torch

from sglang_bcg_dsa.testing import metadata_folder

DISTRIBUTION = "sglang-bcg-dsa-seeded-weights"

# (size, rank): pairs of attributes by which the host's layers say which share they hold.
_SHARES = (("tp_size", "tp_rank"), ("moe_tp_size", "moe_tp_rank"), ("moe_ep_size", "moe_ep_rank"))


def _share(module: torch.nn.Module) -> tuple[int, ...]:
    ranks = tuple(
        int(getattr(module, rank, 0)) for size, rank in _SHARES if getattr(module, size, 1) > 1
    )
    shard = getattr(module, "shard_indices", None)  # vocabulary shards name their rows instead
    return ranks if shard is None else (*ranks, int(shard.org_vocab_start_index))


def _columns(module: torch.nn.Module, scale: str) -> int:
    """Inputs of the matrix that ``scale`` belongs to; two FP4 values share a byte."""
    weight: torch.Tensor = getattr(module, scale.removesuffix("_scale_inv"))
    return weight.shape[-1] * (1 if weight.is_floating_point() else 2)


def seed_weights(model: torch.nn.Module, *_: Any, seed: int = 7, **__: Any) -> None:
    """Fill ``model``'s parameters; the host function's other arguments go unused.

    FP8 and packed FP4 weights get values of order one and their block scales carry the rest of the range. Wider
    integers are tables of indices (DeepSeek-V4's hash routing): the host's own, valid values stay.
    """
    with torch.no_grad():
        for path, module in model.named_modules():
            for name, parameter in module.named_parameters(recurse=False):
                key = f"{seed}/{path}.{name}/{_share(module)}"
                generator = torch.Generator(parameter.device).manual_seed(zlib.crc32(key.encode()))
                if parameter.dtype == torch.int8:
                    parameter.random_(-128, 128, generator=generator)
                if not parameter.is_floating_point():
                    continue
                noise = torch.rand(parameter.shape, generator=generator, device=parameter.device) - 0.5
                if name.endswith("scale_inv"):
                    noise = (1 + 0.2 * noise) / _columns(module, name) ** 0.5
                elif parameter.element_size() == 1:
                    noise *= 4
                elif parameter.dim() >= 2:
                    noise *= 4 / parameter.shape[-1] ** 0.5
                elif "bias" in name:
                    noise *= 0.2
                else:
                    noise = 1 + 0.2 * noise
                parameter.copy_(noise)


def register() -> None:
    """Entry point of ``sglang.srt.plugins``: dummy weights are these, in processes that hold a model."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if multiprocessing.parent_process() is not None:
        target = "sglang.srt.model_loader.weight_utils.initialize_dummy_weights"
        HookRegistry.register(target, seed_weights, HookType.REPLACE)


def write_distribution(directory: Path) -> Path:
    """Write the metadata folder into ``directory`` (to go on ``PYTHONPATH``) and return its path."""
    return metadata_folder.write(
        directory, DISTRIBUTION, {"sglang.srt.plugins": {"bcg_seeded_weights": f"{__name__}:register"}}
    )
