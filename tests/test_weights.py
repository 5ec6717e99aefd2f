"""Seeded weights: what each kind of parameter gets, without the host."""

from __future__ import annotations

import torch

from sglang_bcg_dsa.testing.weights import seed_weights

INPUTS, OUTPUTS = 320, 256


def _parameter(shape: tuple[int, ...], dtype: torch.dtype) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(shape).to(dtype), requires_grad=False)


class Layer(torch.nn.Module):
    """One of each kind that DeepSeek's FP8, FP4 and hash-routed layers hold."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = _parameter((OUTPUTS, INPUTS), torch.float8_e4m3fn)
        self.weight_scale_inv = _parameter((2, 3), torch.float32)  # the last block of 128 columns is half full
        self.w2_weight = _parameter((4, OUTPUTS, INPUTS // 2), torch.int8)
        self.w2_weight_scale_inv = _parameter((4, OUTPUTS, INPUTS // 32), torch.float32)
        self.tid2eid = torch.nn.Parameter(torch.arange(600, dtype=torch.int32).view(100, 6) % 4, requires_grad=False)
        self.k_scale = _parameter((), torch.float32)


def seeded() -> Layer:
    """A layer with its weights."""
    layer = Layer()
    seed_weights(layer)
    return layer


def test_scales_match_the_inputs_of_their_matrix() -> None:
    """A scaled matrix keeps activations near one, whatever a scale covers and however many values share a byte."""
    layer = seeded()
    torch.testing.assert_close(layer.weight_scale_inv.mean().item(), INPUTS**-0.5, rtol=0.1, atol=0)
    torch.testing.assert_close(layer.w2_weight_scale_inv.mean().item(), INPUTS**-0.5, rtol=0.02, atol=0)
    assert 1 < layer.weight.float().std() < 1.3


def test_packed_fp4_takes_all_codes_and_is_the_same_again() -> None:
    """FP4 weights that were left as allocated would be another model in each process."""
    first, again = seeded().w2_weight, seeded().w2_weight
    assert torch.equal(first, again)
    assert len(set(first.flatten().tolist())) == 256


def test_tables_of_indices_stay() -> None:
    """A hash-routing table must hold experts that exist."""
    assert torch.equal(seeded().tid2eid, Layer().tid2eid)
