"""A seeded traffic mix for a rehearsal. Pure; token ids only.

Contract: the same seed gives the same requests. The mix contains what takes different paths
through a prefill: lone requests (the other ranks idle), bursts (several requests a batch, ranks of
different sizes), shared prefixes (radix hits), prompts longer than a chunk, prompts above the
ladder, and lengths at a bucket's edge.
"""

from __future__ import annotations

import random
from typing import NamedTuple


class Wave(NamedTuple):
    """Requests that are sent together; the next wave waits for all answers."""

    kind: str
    prompts: tuple[tuple[int, ...], ...]


_FIRST_TOKEN = 5
"""Ids below are special in the rehearsal's models."""


def waves(seed: int, requests: int, ranks: int, ladder: tuple[int, ...], chunk: int, vocabulary: int) -> list[Wave]:
    """At least one wave, ``requests`` prompts in all. ``chunk``: the chunked-prefill size in tokens."""
    if requests < 1:
        raise ValueError(f"{requests} requests; expected at least 1")
    random_source = random.Random(seed)

    def prompt(length: int, prefix: tuple[int, ...] = ()) -> tuple[int, ...]:
        fresh = max(1, length - len(prefix))
        return prefix + tuple(random_source.randrange(_FIRST_TOKEN, vocabulary) for _ in range(fresh))

    top = ladder[-1]
    edges = [size + step for size in ladder for step in (-1, 0, 1) if 1 <= size + step <= top]
    shared = prompt(top // 2)
    made: list[Wave] = []
    left = requests
    while left:
        turn = len(made) % 5
        if turn == 0:
            wave = Wave("lone", (prompt(random_source.choice(edges)),))
        elif turn == 1:
            sizes = [random_source.randint(max(1, ladder[0] // 2), max(2, top // ranks)) for _ in range(2 * ranks)]
            wave = Wave("burst", tuple(prompt(size) for size in sizes))
        elif turn == 2:
            size = len(shared) + random_source.randint(ladder[0] // 2 + 1, ladder[0])
            wave = Wave("shared prefix", tuple(prompt(size, shared) for _ in range(ranks)))
        elif turn == 3:
            wave = Wave("chunked", (prompt(chunk + random_source.randint(ladder[0], top)),))
        else:
            wave = Wave("skewed", (prompt(ladder[0]), prompt(top)))
        wave = Wave(wave.kind, wave.prompts[:left])
        left -= len(wave.prompts)
        made.append(wave)
    return made
