"""The metadata contract: what captured kernels read by address is refreshed in place.

Contract: every field of a metadata dataclass has one of four policies.

========== =====================================================================================
``COPY``   a captured kernel reads it by address: contents are copied in place; shape, dtype and
           device must be those of capture; None stays None
``REBIND`` read only inside breaks: the captured object gets the live value
``EQUAL``  configuration: must compare equal at capture and replay
``DERIVED`` computed in the graph from other fields: left alone
========== =====================================================================================

A field without a policy stops at construction, so a host release that adds a field is found at
start. :meth:`Contract.refresh` checks everything before it writes anything, copies with one
multi-tensor launch per dtype, and never reads a tensor's values on the host. It runs before every
replay: names are looked up once, and only what does not fit at first sight is walked field by field.
A named tuple may be nested in a dataclass; its fields cannot be rebound.

Not promised: that a policy is right. A field declared ``REBIND`` that a captured kernel reads goes
stale; the tape (``sglang_bcg_dsa.testing``) shows that as a wrong result on a CPU.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from typing import Any

import torch

from sglang_bcg_dsa.errors import MetadataError


class Policy(enum.Enum):
    """How one field is carried from a live batch into captured metadata."""

    COPY = "copy"
    REBIND = "rebind"
    EQUAL = "equal"
    DERIVED = "derived"


class Contract:
    """The policies of one metadata class; a nested dataclass or named tuple has a Contract for its policy."""

    def __init__(self, cls: type, policies: Mapping[str, Policy | Contract]) -> None:
        """Raises MetadataError unless ``policies`` names exactly the fields of ``cls``."""
        fields = fields_of(cls)
        if unclassified := sorted(fields - policies.keys()):
            raise MetadataError(
                f"{cls.__qualname__}.{unclassified[0]} has no policy"
                + (f" (nor have {', '.join(unclassified[1:])})" if unclassified[1:] else "")
                + "; decide whether captured kernels read it (copy) or only breaks do (rebind)"
            )
        if unknown := sorted(policies.keys() - fields):
            raise MetadataError(f"{cls.__qualname__} has no field {unknown[0]}; remove its policy")
        if issubclass(cls, tuple) and Policy.REBIND in policies.values():
            raise MetadataError(f"{cls.__qualname__} is a tuple: its fields cannot be rebound, rebind the whole")
        self.cls = cls
        self._policies = dict(policies)
        paths = {policy: list(self._paths(policy)) for policy in Policy}
        self._copied, self._equal, self._rebound = (
            _reader(paths[policy]) for policy in (Policy.COPY, Policy.EQUAL, Policy.REBIND)
        )
        self._rebinds = [(attrgetter(owner) if owner else _itself, name)
                         for owner, _, name in (path.rpartition(".") for path in paths[Policy.REBIND])]  # fmt: skip

    def refresh(self, captured: Any, live: Any) -> None:
        """Bring ``captured``, whose addresses a graph holds, to the values of ``live``.

        Both are instances of the dataclass. Raises MetadataError, naming the field, before
        anything is written here. ``live`` is not changed and may be dropped afterwards; where its tensors are
        ``captured``'s own, whoever made it has written them.
        """
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if not self._fits(captured, live, copies):
            copies.clear()
            rebinds: list[tuple[Any, str, Any]] = []
            self._plan(captured, live, self.cls.__qualname__, copies, rebinds)
            _copy(copies)
            for owner, name, value in rebinds:
                setattr(owner, name, value)
            return
        _copy(copies)
        for (owner, name), value in zip(self._rebinds, self._rebound(live), strict=True):
            setattr(owner(captured), name, value)

    def release(self, captured: Any) -> None:
        """Let go of what was rebound: a batch's tables need not wait for the next replay of their bucket."""
        for name, policy in self._policies.items():
            if policy is Policy.REBIND:
                setattr(captured, name, None)
            elif isinstance(policy, Contract) and getattr(captured, name) is not None:
                policy.release(getattr(captured, name))

    def _paths(self, wanted: Policy) -> Iterator[str]:
        for name, policy in self._policies.items():
            if policy is wanted:
                yield name
            elif isinstance(policy, Contract):
                yield from (f"{name}.{path}" for path in policy._paths(wanted))

    def _fits(self, captured: Any, live: Any, copies: list[tuple[torch.Tensor, torch.Tensor]]) -> bool:
        """Whether all is as captured at first sight; ``copies`` is then filled. False where it takes a closer look."""
        if type(captured) is not self.cls or type(live) is not self.cls:
            return False
        try:
            for old, new in zip(self._copied(captured), self._copied(live), strict=True):
                if old is not new:
                    if old.shape != new.shape or old.dtype != new.dtype or old.device != new.device:
                        return False
                    copies.append((old, new))
            return all(a is b or _same(a, b) for a, b in zip(self._equal(captured), self._equal(live), strict=True))
        except AttributeError:  # a None on either side
            return False

    def _plan(
        self,
        captured: Any,
        live: Any,
        path: str,
        copies: list[tuple[torch.Tensor, torch.Tensor]],
        rebinds: list[tuple[Any, str, Any]],
    ) -> None:
        for side, value in (("captured", captured), ("live", live)):
            if not isinstance(value, self.cls):
                raise MetadataError(f"{path}: {side} metadata is {type(value).__name__}, expected {self.cls.__name__}")
        for name, policy in self._policies.items():
            old, new, where = getattr(captured, name), getattr(live, name), f"{path}.{name}"
            if policy is Policy.DERIVED:
                continue
            if policy is Policy.REBIND:
                rebinds.append((captured, name, new))
            elif policy is Policy.EQUAL:
                if not _same(old, new):
                    raise MetadataError(f"{where} is {new!r}, but {old!r} was captured; it must be the same")
            elif (old is None) != (new is None):
                raise MetadataError(
                    f"{where} is {_kind(new)}, but {_kind(old)} was captured; a captured kernel would read "
                    "the old contents"
                )
            elif old is None:
                continue
            elif isinstance(policy, Contract):
                policy._plan(old, new, where, copies, rebinds)
            else:
                _check_copy(where, old, new)
                if old.data_ptr() != new.data_ptr():
                    copies.append((old, new))


def _itself(value: Any) -> Any:
    return value


def _reader(paths: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """Reads the fields at dotted ``paths``; one path is a tuple of one, as attrgetter's is not."""
    if len(paths) > 1:
        return attrgetter(*paths)
    return lambda owner: tuple(attrgetter(path)(owner) for path in paths)


def _copy(copies: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    by_dtype: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}
    for into, source in copies:
        targets, sources = by_dtype.setdefault(into.dtype, ([], []))
        targets.append(into)
        sources.append(source)
    for targets, sources in by_dtype.values():
        torch._foreach_copy_(targets, sources, non_blocking=True)


def fields_of(cls: type) -> frozenset[str]:
    """Names of the fields of a dataclass or named tuple. Raises MetadataError for another class."""
    if dataclasses.is_dataclass(cls):
        return frozenset(field.name for field in dataclasses.fields(cls))
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return frozenset(cls._fields)
    raise MetadataError(f"{cls.__qualname__} is not a dataclass; the contract needs declared fields")


def known(cls: type, policies: Mapping[str, Policy]) -> dict[str, Policy]:
    """The policies of the fields this release has; one that a later release added is not missed before."""
    declared = fields_of(cls)
    return {name: policy for name, policy in policies.items() if name in declared}


def _check_copy(where: str, old: Any, new: Any) -> None:
    if not isinstance(old, torch.Tensor) or not isinstance(new, torch.Tensor):
        raise MetadataError(f"{where} has the policy copy but is {_kind(new)} (captured: {_kind(old)})")
    for what in ("shape", "dtype", "device"):
        if getattr(old, what) != getattr(new, what):
            raise MetadataError(
                f"{where} has {what} {_plain(getattr(new, what))}, but {_plain(getattr(old, what))} was captured"
            )


def _same(old: Any, new: Any) -> bool:
    """Equality without reading tensor values: a tensor equals only itself."""
    if isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor):
        return old is new
    return bool(old == new)


def _plain(value: Any) -> str:
    return str(tuple(value)) if isinstance(value, torch.Size) else str(value)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {_plain(value.shape)}"
    return "None" if value is None else f"a {type(value).__name__}"
