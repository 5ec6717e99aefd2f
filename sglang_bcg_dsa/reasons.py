"""Why a prefill does not replay: one bit each, so that all of them fit into a vote.

Contract: builtin reasons have fixed bits; reasons of other plugins get the bits after them, in
the order of their names, so that ranks with the same plugins number them alike. The table is part
of what ranks exchange at start. A vote's column is an int64 with one bit taken by the host's own
value, hence :data:`MAX_REASONS`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from sglang_bcg_dsa.errors import PluginError

MAX_REASONS: Final = 62

# Name, meaning and what to do, in bit order. Append only: a bit that changes its meaning makes the
# logs of two releases disagree.
_BUILTIN: Final[tuple[tuple[str, str, str], ...]] = (
    ("not_prefill", "this rank runs a decode batch while another rank prefills",
     "Separate prefill from decode (PD disaggregation), or leave it: such steps run eagerly by design."),
    ("no_graph_runner", "this rank has no captured prefill graphs",
     "Look for 'prefill graphs: off, by' in the log of the launching process."),
    ("input_embeds", "the batch brings embeddings instead of token ids", "Send token ids where the client can."),
    ("replace_embeds", "the batch replaces embeddings of some tokens", "Send token ids where the client can."),
    ("prefix", "a cached prefix needs an attention path that was not captured",
     "For DSA models, see in the log why sparse attention is a break; plain MLA models stay eager with prefixes."),
    ("target_verify", "a speculative verification batch", "Nothing: verification is not a prefill of new tokens."),
    ("hidden_mode", "the batch wants hidden states that were not captured",
     "Drop return_hidden_states, or send these requests to a server of their own with --enable-return-hidden-states."),
    ("logprob", "log-probabilities are asked for and the captured graph includes the logits",
     "Ask for log-probabilities of generated tokens only, or accept eager prefills for these requests."),
    ("lora", "the batch needs LoRA adapters that were not captured",
     "Serve adapters from another server, or accept eager prefills for them."),
    ("mixed", "prefill mixed with decode, which this model keeps eager", "Drop --enable-mixed-chunk."),
    ("multimodal", "images or audio in the batch, which this model keeps eager",
     "Send text to a server of its own, or accept eager prefills for these requests."),
    ("context_length", "a request's context is longer than the captured limit",
     "Raise --cuda-graph-prefill-max-context."),
    ("batch_size", "more requests than the captured metadata holds",
     "Lower --max-running-requests or --prefill-max-requests, so that fewer requests share a prefill."),
    ("above_ladder", "more tokens than the largest bucket",
     "Raise --cuda-graph-max-bs-prefill, or lower --chunked-prefill-size."),
    ("padding", "the bucket would more than double the tokens",
     "Add buckets between the present ones with --cuda-graph-bs-prefill."),
    ("inactive_rank", "a rank of the group has no tokens, so no rank replays",
     "Spread requests evenly over the DP ranks; more concurrent requests leave fewer ranks idle."),
    ("host", "SGLang itself refuses this batch, for a reason this plugin does not know",
     "Please report it with the server's arguments and SGLang's release."),
)  # fmt: skip
NAMES: Final[tuple[str, ...]] = tuple(name for name, _, _ in _BUILTIN)

NOT_PREFILL: Final = 1 << 0
NO_GRAPH_RUNNER: Final = 1 << 1
INPUT_EMBEDS: Final = 1 << 2
REPLACE_EMBEDS: Final = 1 << 3
PREFIX: Final = 1 << 4
TARGET_VERIFY: Final = 1 << 5
HIDDEN_MODE: Final = 1 << 6
LOGPROB: Final = 1 << 7
LORA: Final = 1 << 8
MIXED: Final = 1 << 9
MULTIMODAL: Final = 1 << 10
CONTEXT_LENGTH: Final = 1 << 11
BATCH_SIZE: Final = 1 << 12
ABOVE_LADDER: Final = 1 << 13
PADDING: Final = 1 << 14
INACTIVE_RANK: Final = 1 << 15
HOST: Final = 1 << 16


class ReasonTable:
    """The reasons known in this process: builtin, then those that plugins declared.

    Frozen after construction. ``names[i]`` is the reason of bit ``1 << i``.
    """

    def __init__(self, declared: Iterable[tuple[str, str]] = ()) -> None:
        """``declared``: (plugin name, reason name) pairs; raises PluginError for a bad one."""
        extra: dict[str, str] = {}
        for plugin, name in declared:
            if not re.fullmatch(r"[a-z][a-z0-9_]{0,31}", name):
                raise PluginError(
                    f"plugin {plugin!r} declares the reason {name!r}; expected lower-case letters, "
                    "digits and underscores, at most 32, starting with a letter"
                )
            if name in NAMES:
                raise PluginError(f"plugin {plugin!r} declares the builtin reason {name!r}; choose another name")
            if name in extra:
                raise PluginError(f"plugins {extra[name]!r} and {plugin!r} both declare the reason {name!r}")
            extra[name] = plugin
        self.names: tuple[str, ...] = (*NAMES, *sorted(extra))
        if len(self.names) > MAX_REASONS:
            raise PluginError(f"{len(self.names)} reasons are declared; a vote has room for {MAX_REASONS}")
        self.owners: dict[str, str] = extra
        self._bits = {name: 1 << i for i, name in enumerate(self.names)}

    def bit(self, name: str) -> int:
        """The bit of one reason; KeyError for one that was not declared."""
        return self._bits[name]

    def decode(self, mask: int) -> tuple[str, ...]:
        """The names in a mask, in bit order."""
        return tuple(name for i, name in enumerate(self.names) if mask >> i & 1)

    def text(self, mask: int) -> str:
        """The names in a mask for a message; "none" for an empty one."""
        return ", ".join(self.decode(mask)) or "none"


def meaning(name: str) -> str:
    """One sentence on a builtin reason; an empty string for a plugin's own."""
    return next((text for known, text, _ in _BUILTIN if known == name), "")


def cure(name: str) -> str:
    """What to do about a reason, in one sentence."""
    return next((text for known, _, text in _BUILTIN if known == name), "A plugin refuses these batches: ask its documentation.")
