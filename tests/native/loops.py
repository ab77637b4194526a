"""Writes the loops of all exchanges for `exchanges.cpp`, which runs them."""

from __future__ import annotations

import struct

from symm_cp.runtime import loops


def written(world_size: int) -> bytes:
    """Returns the steps of all exchanges on each rank."""
    parts = []
    exchanges = list(loops.exchanges())
    for kind, channel, variant in exchanges:
        parts.append(struct.pack("3q", kind, channel, loops.loop_kind(variant)))
        for rank in range(world_size):
            steps, sources = loops.lowered(variant, rank, world_size)
            parts += [struct.pack("2q", len(steps), len(sources)), bytes(steps), bytes(sources)]
    return struct.pack("2q", world_size, len(exchanges)) + b"".join(parts)
