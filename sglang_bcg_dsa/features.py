"""Which features run on this host: configuration, seams and plugins put together.

Contract: pure; imports neither torch nor the host. Each table of the configuration is a feature
that a builtin plugin offers; one whose seams do not fit is ``refused``, demanded or not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pluggy

from sglang_bcg_dsa.config import FEATURES, Config
from sglang_bcg_dsa.errors import HostMismatch, StartupError
from sglang_bcg_dsa.records import Feature, State
from sglang_bcg_dsa.seams import SeamSet

_SHARED: dict[str, tuple[str, ...]] = {
    "attention": ("engine", "parallel", "dsv4"),
    "moe": ("engine", "parallel"),
    "vote": ("parallel",),
    "explain": ("parallel",),
    "audit": ("parallel",),
}
"""Groups of seams that belong to no feature of their own, by the feature that uses them."""

WORKING_RELEASES = "0.5.16, 0.5.17, 0.5.20, 0.5.23"


def decide(config: Config, seams: SeamSet, manager: pluggy.PluginManager) -> tuple[Feature, ...]:
    """The state of every feature, in the order of the configuration's tables."""
    offers = {offer.name: offer for offer in manager.hook.bcg_feature(config=config, seams=seams) if offer}
    return tuple(_state(config, seams, name, offers) for name in FEATURES)


def _state(config: Config, seams: SeamSet, name: str, offers: Mapping[str, Feature]) -> Feature:
    if config.enabled(name) is False:
        return Feature(name, State.OFF, f"[{name}] enabled = false")
    if missing := seams.missing([name, *_SHARED.get(name, ())]):
        return Feature(name, State.REFUSED, f"{len(missing)} seams do not fit this SGLang")
    return offers[name]


def require(features: Sequence[Feature], seams: SeamSet, host: str) -> None:
    """Raise, naming every seam or feature, when something that was asked for is refused."""
    refused = [f for f in features if f.state is State.REFUSED]
    missing = seams.missing({"flag", *(part for f in refused for part in (f.name, *_SHARED.get(f.name, ())))})
    if missing:
        listing = "\n".join(f"  {m.key}: {m}" for m in missing)
        raise HostMismatch(
            f"{host} lacks {len(missing)} of the seams this plugin needs:\n{listing}\n"
            f"Releases that fit: {WORKING_RELEASES}. Install one of them, for example "
            "'pip install sglang==0.5.23', or take bcg_dsa out of --plugins"
        )
    if refused:
        raise StartupError("; ".join(f"feature {f.name} is refused: {f.reason}" for f in refused))


def as_state(features: Sequence[Feature]) -> dict[str, str]:
    """Feature states in builtin types: what ranks compare and /server_info shows."""
    return {f.name: f.state.value for f in features}
