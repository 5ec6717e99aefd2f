"""Metadata folders: what makes a process find entry points that are not installed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write(directory: Path, distribution: str, entry_points: Mapping[str, Mapping[str, str]]) -> Path:
    """Write a ``dist-info`` folder into ``directory``, which is to go on ``PYTHONPATH``; return the folder.

    ``entry_points``: group to (name to ``module:attribute``).
    """
    folder = directory / f"{distribution.replace('-', '_')}-0.dist-info"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0\n")
    (folder / "entry_points.txt").write_text(
        "\n".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in entry_points.items()
        )
    )
    return folder
