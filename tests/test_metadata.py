"""The metadata contract: addresses stay, values are fresh, and what is forgotten is found."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from sglang_bcg_dsa.errors import MetadataError
from sglang_bcg_dsa.metadata import Contract, Policy


@dataclasses.dataclass
class Inner:
    plan: torch.Tensor | None
    width: int


@dataclasses.dataclass
class Outer:
    lens: torch.Tensor
    table: torch.Tensor | None
    host: Any
    page_size: int
    cache: Any
    inner: Inner | None = None


INNER = Contract(Inner, {"plan": Policy.COPY, "width": Policy.EQUAL})
OUTER = Contract(
    Outer,
    {"lens": Policy.COPY, "table": Policy.COPY, "host": Policy.REBIND, "page_size": Policy.EQUAL,
     "cache": Policy.DERIVED, "inner": INNER},
)  # fmt: skip


def make(seed: int = 0, **changed: Any) -> Outer:
    source = torch.Generator().manual_seed(seed)
    made = Outer(
        lens=torch.randint(0, 99, (4,), generator=source),
        table=torch.randint(0, 99, (4, 3), generator=source, dtype=torch.int32),
        host=[seed],
        page_size=64,
        cache=object(),
        inner=Inner(torch.rand(5, generator=source), 8),
    )
    return dataclasses.replace(made, **changed)


@given(st.lists(st.integers(0, 2**31), min_size=1, max_size=20))
def test_addresses_stay_and_values_follow_over_many_replays(seeds: list[int]) -> None:
    """Whatever batches come, a captured kernel reads this batch's values at the captured address."""
    captured = make()
    assert captured.table is not None
    assert captured.inner is not None
    assert captured.inner.plan is not None
    kept = (captured.lens, captured.table, captured.inner, captured.inner.plan, captured.cache)
    pointers = (captured.lens.data_ptr(), captured.table.data_ptr(), captured.inner.plan.data_ptr())
    for seed in seeds:
        live = make(seed)
        OUTER.refresh(captured, live)
        assert captured.inner is not None
        assert all(a is b for a, b in zip(kept, (captured.lens, captured.table, captured.inner, captured.inner.plan,
                                                 captured.cache), strict=True))  # fmt: skip
        assert pointers == (captured.lens.data_ptr(), captured.table.data_ptr(), captured.inner.plan.data_ptr())
        assert torch.equal(captured.lens, live.lens)
        assert torch.equal(captured.table, live.table)
        assert torch.equal(captured.inner.plan, live.inner.plan)
        assert captured.host is live.host


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (dict(table=None), "Outer.table is None, but a tensor (4, 3) was captured"),
        (dict(lens=torch.zeros(5, dtype=torch.int64)), "Outer.lens has shape (5,), but (4,) was captured"),
        (dict(lens=torch.zeros(4)), "Outer.lens has dtype torch.float32, but torch.int64 was captured"),
        (dict(lens=[1, 2]), "Outer.lens has the policy copy but is a list"),
        (dict(page_size=128), "Outer.page_size is 128, but 64 was captured"),
        (dict(inner=None), "Outer.inner is None, but a Inner was captured"),
        (dict(inner=Inner(torch.zeros(6), 8)), "Outer.inner.plan has shape (6,)"),
        (dict(inner=Inner(torch.zeros(5), 9)), "Outer.inner.width is 9, but 8"),
    ],
)
def test_what_does_not_fit_stops_before_anything_is_written(changed: dict[str, Any], message: str) -> None:
    """A misfit names its field, and the captured metadata is as it was: never half of two batches."""
    captured = make(1)
    before = captured.lens.clone(), captured.host
    with pytest.raises(MetadataError) as caught:
        OUTER.refresh(captured, make(2, **changed))
    assert message in str(caught.value)
    assert torch.equal(captured.lens, before[0])
    assert captured.host is before[1]


def test_none_stays_none() -> None:
    """A field that was captured as None and is None now is no difference."""
    captured = make(1, table=None, inner=Inner(None, 8))
    OUTER.refresh(captured, make(2, table=None, inner=Inner(None, 8)))
    assert captured.table is None


def test_a_field_without_a_policy_stops_at_start() -> None:
    """A host release that adds fields is found at construction, not as wrong tokens."""
    with pytest.raises(MetadataError) as caught:
        Contract(Inner, {"plan": Policy.COPY})
    assert "Inner.width has no policy" in str(caught.value)


def test_a_policy_without_a_field_stops_at_start() -> None:
    """A field that the host removed leaves no policy that pretends to guard something."""
    with pytest.raises(MetadataError, match="Inner has no field gone"):
        Contract(Inner, {"plan": Policy.COPY, "width": Policy.EQUAL, "gone": Policy.COPY})


def test_only_dataclasses_have_a_contract() -> None:
    """Without declared fields nothing can be checked."""
    with pytest.raises(MetadataError, match="not a dataclass"):
        Contract(dict, {})


def test_metadata_of_another_kind_is_refused() -> None:
    """Refreshing from another class would copy by coincidence of names."""
    with pytest.raises(MetadataError, match="live metadata is Inner, expected Outer"):
        OUTER.refresh(make(), Inner(None, 1))


class _Ops(TorchDispatchMode):
    """Lists the operators that run, as a device would see them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def test_one_launch_a_dtype_and_no_value_is_read_on_the_host() -> None:
    """The refresh is grouped, and nothing in it waits for the device."""
    captured, live = make(1), make(2)
    with _Ops() as ops:
        OUTER.refresh(captured, live)
    copies = [name for name in ops.seen if "copy" in name]
    assert len(copies) == 3, ops.seen  # int64, int32, float32
    assert all(name.startswith("aten._foreach_copy_") for name in copies)
    assert not [n for n in ops.seen if "_local_scalar_dense" in n or "nonzero" in n or "equal" in n]


def test_a_tensor_declared_equal_must_be_the_same_tensor() -> None:
    """Comparing values would synchronise; another tensor is refused without looking into it."""
    contract = Contract(Inner, {"plan": Policy.EQUAL, "width": Policy.EQUAL})
    shared = torch.zeros(2)
    contract.refresh(Inner(shared, 1), Inner(shared, 1))
    with pytest.raises(MetadataError, match="must be the same"):
        contract.refresh(Inner(shared, 1), Inner(torch.zeros(2), 1))


def test_a_wrong_policy_shows_on_the_tape() -> None:
    """REBIND for what a captured kernel reads goes stale: the tape gives the old result, COPY the new."""
    from sglang_bcg_dsa.testing import TapeGraph

    results = {}
    for policy in (Policy.COPY, Policy.REBIND):
        contract = Contract(Inner, {"plan": policy, "width": Policy.EQUAL})
        captured = Inner(torch.ones(3), 1)
        graph = TapeGraph()
        graph.capture_begin()
        total = captured.plan.sum() * 2  # type: ignore[union-attr]
        graph.capture_end()
        contract.refresh(captured, Inner(torch.full((3,), 5.0), 1))
        graph.replay()
        results[policy] = float(total)
    assert results == {Policy.COPY: 30.0, Policy.REBIND: 6.0}
