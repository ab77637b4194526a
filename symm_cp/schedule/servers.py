"""Servers with several sockets: predicted times of ops on ranks with many threads.

Figures are the vendors', per socket, and for links in one direction. Xeon 6980P: 128 cores, 12
channels of MRDIMM 8800 (845 GB/s), 6 UPI 2.0 links of 24 GT/s (288 GB/s), AMX with 1,024 operations
in bfloat16 a cycle at 2 GHz. EPYC 9755: 128 cores, 12 channels of DDR5-6000 (576 GB/s), 4 xGMI
links of 32 Gbit/s and 16 lanes (256 GB/s), AVX-512 with 128 operations a cycle at 2.7 GHz.
Graviton4: 96 cores, 12 channels of DDR5-5600 (538 GB/s), one socket here, as its link is not
published; four BFMMLA of 32 operations a cycle at 2.8 GHz. Grace: 72 cores, LPDDR5X (500 GB/s),
NVLink-C2C (450 GB/s), the same core at 3.1 GHz. Two figures are assumptions: one core copies
12 GB/s (12 read, 12 written), and 0.7 of each peak is reached.

The model: a rank's threads share the bandwidth of their cores and of their part of the socket's
memory; bytes from another socket also share the link. Slots stay in the caches, so they cost time
of cores and links only. Inputs and outputs are in memory, even small ones, which are faster than
predicted. Ranks with more threads than cores count as having one thread per core, as many as the
library uses (csrc/base/team.h).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from symm_cp.schedule.patterns import ALL_GATHER_AND_CONSUME, TWO_SHOT_ALL_REDUCE
from symm_cp.schedule.patterns.two_shot_all_reduce import SOCKETS
from symm_cp.schedule.simulate import simulate
from symm_cp.schedule.steps import Compute, Copy, Region, Step

#: Bytes of a piece of an all-reduce, as in csrc/exchange/exchange.h.
PIECE_BYTES = 512 << 10
#: Sockets with at least this many ranks sum on each first, as in csrc/base/sockets.cpp.
LEAST_ON_SOCKET = 3


@dataclass(frozen=True)
class Server:
    """A host, by the figures of each of its sockets: operations and bytes per second."""

    name: str
    sockets: int
    cores: int
    core_flops: float
    core_rate: float
    memory_rate: float
    link_rate: float = float("inf")
    reached: float = 0.7
    #: Seconds from a signal to the end of the peer's wait, and of a call's own work.
    signal_seconds: float = 1e-6
    call_seconds: float = 5e-6


SERVERS = {
    server.name: server
    for server in (
        Server("xeon6", 2, 128, 2.05e12, 24e9, 845e9, 288e9),
        Server("epyc9005", 2, 128, 346e9, 24e9, 576e9, 256e9),
        Server("graviton4", 1, 96, 358e9, 24e9, 538e9),
        Server("grace", 2, 72, 397e9, 24e9, 500e9, 450e9),
    )
}


@dataclass(frozen=True)
class Spread:
    """Ranks with some threads each on a server, divided among its sockets.

    Raises `ValueError` unless each socket gets the same number of ranks.
    """

    server: Server
    ranks: int
    threads: int

    def __post_init__(self) -> None:
        if self.ranks % self.sockets:
            raise ValueError(f"{self.ranks} ranks must divide into {self.sockets} sockets")

    @property
    def sockets(self) -> int:
        """How many sockets have ranks."""
        return min(self.ranks, self.server.sockets)

    @property
    def each(self) -> int:
        """The number of ranks on a socket."""
        return self.ranks // self.sockets

    @cached_property
    def busy(self) -> float:
        """The number of cores that a rank computes on."""
        return min(self.threads, self.server.cores / self.each)

    @property
    def flops(self) -> float:
        """Operations per second of a rank."""
        return self.busy * self.server.core_flops * self.server.reached

    @property
    def rate(self) -> float:
        """Bytes per second that a rank reads and writes while all ranks do."""
        of_socket = self.server.memory_rate * self.server.reached / self.each
        return min(self.busy * self.server.core_rate, of_socket)

    @property
    def link(self) -> float:
        """Bytes per second that a rank reads of another socket while all ranks do."""
        return self.server.link_rate * self.server.reached / self.each

    def far(self, rank: int, other: int) -> bool:
        """Whether two ranks are on different sockets."""
        return rank // self.each != other // self.each

    def moved(
        self, rank: int, read: Iterable[tuple[Region, float]], to: Region, written: float
    ) -> float:
        """Seconds that a rank takes to read regions, each with its bytes, and to write one."""
        moved, of_memory, crossing = written, 0.0 if to.buffer == "slot" else written, 0.0
        for region, nbytes in read:
            moved += nbytes
            of_memory += nbytes if region.buffer != "slot" else 0.0
            crossing += nbytes if self.far(rank, region.rank) else 0.0
        by_cores = moved / (self.busy * self.server.core_rate)
        return max(by_cores, of_memory / self.rate, crossing / self.link)


def all_reduce(spread: Spread, nbytes: float, *, by_socket: bool | None = None) -> float:
    """Returns the seconds of an all-reduce in two shots.

    `by_socket`: whether ranks on several sockets sum on each first; None: as the library does.
    """
    option = next((name for name, n in SOCKETS.items() if n == spread.sockets), "")
    if by_socket is None:
        by_socket = spread.each >= LEAST_ON_SOCKET
    variant = TWO_SHOT_ALL_REDUCE.direct(**({option: True} if option and by_socket else {}))
    pieces = max(1, round(nbytes / PIECE_BYTES))
    chunk = nbytes / pieces / spread.ranks

    def cost(rank: int, step: Step) -> float:
        if isinstance(step, Copy):
            # A copy without a chunk publishes, or takes, all of a rank's tensor.
            size = chunk if step.src.chunk is not None else chunk * spread.ranks
            return spread.moved(rank, [(step.src, size)], step.dst, size)
        if isinstance(step, Compute):
            return spread.moved(rank, [(r, chunk) for r in step.reads], step.writes[0], chunk)
        return 0.0

    schedules = variant.schedules(spread.ranks, pieces=pieces)
    timeline = simulate([schedules], cost, signal=spread.server.signal_seconds)
    return timeline.total + spread.server.call_seconds


def all_gather(spread: Spread, nbytes: float, *, by_socket: bool = False) -> float:
    """Returns the seconds of an all-gather of `nbytes` a rank.

    `by_socket`: ranks on two sockets fetch equal parts of the other socket's bytes to slots, where
    ranks of their own socket read them: each byte crosses the link once, and is moved once more.
    The library does not do this, as it rarely pays; see benchmarks/README.md.
    """
    far = nbytes * (spread.ranks - spread.each)
    own, other = Region(0, "slot"), Region(spread.ranks - 1, "slot")

    def copy(to: str, *read: tuple[Region, float]) -> float:
        return spread.moved(0, read, Region(0, to), sum(size for _, size in read))

    seconds = copy("slot", (Region(0, "input"), nbytes))
    if by_socket:
        seconds += copy("slot", (other, far / spread.each))
        seconds += copy("output", (own, nbytes * spread.ranks))
    else:
        seconds += copy("output", (own, nbytes * spread.each), (other, far))
    signals = max(1, round(nbytes / PIECE_BYTES)) * (2 if by_socket else 1)
    return seconds + signals * spread.server.signal_seconds + spread.server.call_seconds


def gather_matmul(
    spread: Spread, rows: int, inner: int, columns: int, *, item: int = 2, fused: bool = True
) -> float:
    """Returns the seconds of an all-gather-matmul of `rows` a rank, fused or not.

    Unfused, the rows are gathered first, and then multiplied. `item`: bytes of an element.
    """
    shard, weight = float(rows * inner * item), float(inner * columns * item)
    result = float(rows * columns * item)

    def kernel(rank: int, owner: int, shards: int) -> float:
        computing = 2.0 * rows * shards * inner * columns / spread.flops
        read = [(Region(owner, "slot"), shard * shards)]
        moved = spread.moved(rank, read, Region(rank, "output"), result * shards)
        return max(computing, moved + weight / spread.rate)

    def cost(rank: int, step: Step) -> float:
        if isinstance(step, Copy):
            return spread.moved(rank, [(step.src, shard)], step.dst, shard)
        return kernel(rank, step.reads[0].rank, 1) if isinstance(step, Compute) else 0.0

    if fused:
        schedules = ALL_GATHER_AND_CONSUME.direct().schedules(spread.ranks)
        timeline = simulate([schedules], cost, signal=spread.server.signal_seconds)
        return timeline.total + spread.server.call_seconds
    sources = [(Region(rank, "slot"), shard) for rank in range(spread.ranks)]
    gathered = spread.moved(0, [(Region(0, "input"), shard)], Region(0, "slot"), shard)
    gathered += spread.moved(0, sources, Region(0, "output"), shard * spread.ranks)
    return gathered + kernel(0, 0, spread.ranks) + 2 * spread.server.call_seconds


def decode(spread: Spread, parameters: float, layers: int, hidden: int, *, item: int = 2) -> float:
    """Returns the seconds of a token of a model under tensor parallelism.

    Each rank reads its part of the weights; each layer has two all-reduces of `hidden` elements,
    in one shot: each rank reads the elements of all others, and waits for nothing else.
    """
    reading = parameters * item / spread.ranks / spread.rate
    if spread.ranks == 1:
        return reading
    sources = [(Region(rank, "slot"), float(hidden * item)) for rank in range(spread.ranks)]
    reduction = spread.moved(0, sources, Region(0, "output"), hidden * item)
    once = reduction + spread.server.signal_seconds + spread.server.call_seconds
    return reading + 2 * layers * once
