"""The contract between Python and the native part, mirrored by csrc/channel/wire.h.

Defines the arguments of the C functions (enumerations, structs) and the layout of a workspace
(flags, records, slots). `native.load` compares both sides by `description`. Comments on fields are
in csrc/channel/wire.h. Imports no torch.
"""

from __future__ import annotations

import ctypes
from enum import IntEnum

_INT32, _UINT32, _INT64 = ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64


class Space(IntEnum):
    """The memory that holds a step's bytes."""

    OPERAND = 0
    SLOT = 1
    SHARD = 2


class Kind(IntEnum):
    """The steps of native programs."""

    COPY = 0
    SIGNAL = 1
    WAIT = 2
    REDUCE = 3
    PUBLISH = 4
    VERIFY = 5
    PRODUCE = 6
    CONSUME = 7


class StreamKind(IntEnum):
    """The steps of programs for streams."""

    COPY = 0
    SIGNAL = 1
    WAIT = 2
    RECORD = 3
    WAIT_EVENT = 4
    ARRIVED = 5


class DType(IntEnum):
    """Element types of native reductions, numbered as torch numbers its scalar types."""

    UINT8 = 0
    INT8 = 1
    INT16 = 2
    INT32 = 3
    INT64 = 4
    FLOAT16 = 5
    FLOAT32 = 6
    FLOAT64 = 7
    COMPLEX64 = 9
    COMPLEX128 = 10
    BOOL = 11
    BFLOAT16 = 15


class ReduceOp(IntEnum):
    """How native reductions combine elements, numbered as c10d numbers its operators."""

    SUM = 0
    AVG = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7


class ExchangeKind(IntEnum):
    """The kinds of exchanges between ranks."""

    ALL_GATHER = 0
    ALL_REDUCE = 1
    TWO_SHOT_ALL_REDUCE = 2
    REDUCE_SCATTER = 3
    ALL_TO_ALL = 4
    JOINING_ALL_TO_ALL = 5
    HANDLED_ALL_TO_ALL = 6


class LoopKind(IntEnum):
    """The loops of a kind of exchange, by the option of the lowered variant."""

    PLAIN = 0
    IN_PLACE = 1


class Buffer(IntEnum):
    """The buffers of a loop."""

    INPUT = 0
    OUTPUT = 1
    PEER_SLOT = 2
    SYMMETRIC = 3


class Reference(ctypes.Structure):
    """Where bytes begin."""

    _fields_ = [("space", _INT32), ("index", _INT32), ("offset", _INT64)]


class Command(ctypes.Structure):
    """A step of a native program."""

    _fields_ = [
        ("kind", _INT32),
        ("peer", _INT32),
        ("flag", _INT32),
        ("lag", _INT32),
        ("to", Reference),
        ("source", Reference),
        ("bytes", _INT64),
        ("rows", _INT64),
        ("to_pitch", _INT64),
        ("from_pitch", _INT64),
        ("dtype", _INT32),
        ("mean", _INT32),
        ("first_source", _INT32),
        ("sources", _INT32),
        ("piece", _INT32),
    ]


class Area(ctypes.Structure):
    """Part of a buffer of a loop, or all of it."""

    _fields_ = [("buffer", _INT32), ("rank", _INT32), ("chunk", _INT32)]


class LoopStep(ctypes.Structure):
    """A step of the loop over the pieces of an exchange."""

    _fields_ = [
        ("kind", _INT32),
        ("peer", _INT32),
        ("flag", _INT32),
        ("to", Area),
        ("source", Area),
        ("first_source", _INT32),
        ("source_count", _INT32),
    ]


class Box(ctypes.Structure):
    """Elements of a tensor that one piece of an exchange with strides sends."""

    _fields_ = [
        ("peer", _INT32),
        ("piece", _INT32),
        ("operand", _INT64),
        ("offset", _INT64),
        ("in_slot", _INT64),
        ("planes", _INT64),
        ("plane_pitch", _INT64),
        ("rows", _INT64),
        ("pitch", _INT64),
        ("row", _INT64),
    ]


class StreamCommand(ctypes.Structure):
    """A step of a program for streams."""

    _fields_ = [
        ("kind", _INT32),
        ("lane", _INT32),
        ("peer", _INT32),
        ("flag", _INT32),
        ("lag", _INT32),
        ("event", _INT32),
        ("alone", _INT32),
        ("remote", _INT32),
        ("to", Reference),
        ("source", Reference),
        ("bytes", _INT64),
        ("rows", _INT64),
        ("to_pitch", _INT64),
        ("from_pitch", _INT64),
    ]


class TraceEvent(ctypes.Structure):
    """A step that has run, with its times."""

    _fields_ = [
        ("command", Command),
        ("start", _INT64),
        ("end", _INT64),
        ("epoch", _UINT32),
        ("engine", _INT32),
        ("call_name", ctypes.c_char * 40),
    ]


class Record(ctypes.Structure):
    """The record of a rank's call, which its peers compare."""

    _fields_ = [
        ("epoch", _UINT32),
        ("failed", _UINT32),
        ("place", _UINT32),
        ("pieces", _UINT32),
        ("sequence", _INT64),
        ("offset", _INT64),
        ("digest", ctypes.c_uint64),
        ("bytes", _INT64),
        ("call_name", ctypes.c_char * 104),
    ]


class Failure(ctypes.Structure):
    """Why a call failed on a rank."""

    _fields_ = [
        ("epoch", _UINT32),
        ("other_channel", _INT32),
        ("other_number", _INT64),
        ("cause", ctypes.c_char * 240),
    ]


class WorkspaceLayout(ctypes.Structure):
    """Offsets of the parts of a workspace, in bytes from its beginning."""

    _fields_ = [
        ("flags", _INT64),
        ("flag_count", _INT64),
        ("records", _INT64),
        ("slots", _INT64),
        ("slot_bytes", _INT64),
        ("slot_count", _INT64),
    ]

    def slot_offset(self, epoch: int) -> int:
        """Returns the offset of the slot of call `epoch`."""
        slots: int = self.slots
        return slots + epoch % self.slot_count * self.slot_bytes


#: The channels of a group; a channel's number is its index here.
CHANNELS = ("sync", "async")

#: The flags that a rank raises at its peers; a flag's number is its index here.
FLAGS = ("ready", "partial", "reduced", "taken", "done")
#: Devices also have a flag for a rank's own polling kernel, a flag of a rank that has aborted, the
#: words that streams copy to peers' flags, and a "ready" flag for calls that read in place.
DEVICE_FLAGS = (*FLAGS, "arrived", "gave up", "sent", "ready in place")
#: A cache line for each flag and writer.
FLAG_BYTES = 64

#: The last epoch of a workspace: a wait compares 32-bit numbers by their difference, so 2^31 calls
#: later a flag that few ops raise would look as if it had been raised.
LAST_EPOCH = (1 << 31) - 2
#: The bytes of a piece of an exchange on CPU, for all ranks together, and the alignment in bytes of
#: the parts of a piece.
EXCHANGE_PIECE = 512 << 10
EXCHANGE_PART = 64
#: On CPU a flag's value holds a call's epoch and the number of a piece, which takes these bits.
PIECE_BITS = 14
LAST_CPU_EPOCH = (1 << (31 - PIECE_BITS)) - 2

#: The distance between records, in bytes.
RECORD_BYTES = 192
#: The bytes of a call's name that peers compare.
MAX_CALL_NAME = Record.call_name.size - 1
#: The number of failures that a workspace stores.
FAILURES = 8
PAGE_BYTES = 4096
#: The number of slots of a workspace, which its calls take in turn.
SLOTS = 2


def flag_offset(flag: int, writer: int, world_size: int) -> int:
    """Returns the offset of the flag that `writer` raises, from the first flag of its owner."""
    return (flag * world_size + writer) * FLAG_BYTES


#: The index in "sent" of a word that holds 1, after one word for each lane.
CONSTANT_ONE = 3


def sent_offset(word: int, rank: int, world_size: int) -> int:
    """Returns the offset of a word that streams copy to peers' flags, from the first flag."""
    return flag_offset(DEVICE_FLAGS.index("sent"), rank, world_size) + 4 * word


def sizes_bytes(world_size: int) -> int:
    """Returns the bytes, for each slot, of the sizes that a rank sends to each rank."""
    return (8 * world_size + 63) // 64 * 64


ENUMS: tuple[type[IntEnum], ...] = (
    Space,
    Kind,
    StreamKind,
    DType,
    ReduceOp,
    ExchangeKind,
    LoopKind,
    Buffer,
)
STRUCTS: tuple[type[ctypes.Structure], ...] = (
    Reference,
    Command,
    Area,
    LoopStep,
    Box,
    StreamCommand,
    TraceEvent,
    Record,
    Failure,
    WorkspaceLayout,
)


def _enumerators(enum: type[IntEnum]) -> str:
    """Returns the enumerators in C++ spelling: kWaitEvent, with a value after a gap."""
    texts, following = [], 0
    for member in enum:
        name = "k" + member.name.title().replace("_", "")
        texts.append(name if member == following else f"{name} = {member.value}")
        following = member + 1
    return ", ".join(texts)


def _fields(struct: type[ctypes.Structure]) -> str:
    places = ((name, getattr(struct, name)) for name, *_ in struct._fields_)
    fields = " ".join(f"{name}@{place.offset}+{place.size}" for name, place in places)
    return f"{ctypes.sizeof(struct)} bytes: {fields}"


def description() -> str:
    """Returns the contract as text, a line for each entry, as csrc/channel/wire.cpp writes it."""
    entries: dict[str, object] = {
        **{enum.__name__: _enumerators(enum) for enum in ENUMS},
        **{struct.__name__: _fields(struct) for struct in STRUCTS},
        "CHANNELS": ", ".join(CHANNELS),
        "DEVICE_FLAGS": ", ".join(DEVICE_FLAGS),
        "FLAGS": len(FLAGS),
        "FLAG_BYTES": FLAG_BYTES,
        "FLAG_OF_WRITER": flag_offset(1, 2, 3),
        "SENT_ONE": sent_offset(CONSTANT_ONE, 2, 3),
        "LAST_EPOCH": LAST_EPOCH,
        "PIECE_BITS": PIECE_BITS,
        "EXCHANGE_PIECE": EXCHANGE_PIECE,
        "EXCHANGE_PART": EXCHANGE_PART,
        "LAST_CPU_EPOCH": LAST_CPU_EPOCH,
        "SIZES_BYTES": sizes_bytes(9),
        "RECORD_BYTES": RECORD_BYTES,
        "MAX_CALL_NAME": MAX_CALL_NAME,
        "FAILURES": FAILURES,
        "PAGE_BYTES": PAGE_BYTES,
        "SLOTS": SLOTS,
    }
    return "".join(f"{name} {value}\n" for name, value in entries.items())
