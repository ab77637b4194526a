"""What Python shares with the native part: types of the C functions, the layout of a workspace.

csrc/channel/wire.h explains it; names and values are read from there (see `declared`).
"""

from __future__ import annotations

import ctypes

from symm_cp.native.declared import Enumeration, constants, fields, texts
from symm_cp.native.library import load


class Kind(Enumeration):
    """The steps of programs."""


class DType(Enumeration):
    """Element types of native reductions, numbered as torch numbers its scalar types."""


class ReduceOp(Enumeration):
    """How native reductions combine elements, numbered as c10d numbers its operators."""


class ExchangeKind(Enumeration):
    """The kinds of exchanges between ranks."""


class LoopKind(Enumeration):
    """The loops of a kind of exchange, by the option of the lowered variant."""


class Buffer(Enumeration):
    """The memory of a step."""


class Place(ctypes.Structure):
    """Where a step's bytes begin."""

    _fields_ = fields("Place")


class Command(ctypes.Structure):
    """A step of a program."""

    _fields_ = fields("Command", Place)


class Box(ctypes.Structure):
    """Elements of a tensor that one piece of an exchange with strides sends."""

    _fields_ = fields("Box")


class TraceEvent(ctypes.Structure):
    """A step that has run, with its times."""

    _fields_ = fields("TraceEvent", Command)


class WorkspaceLayout(ctypes.Structure):
    """Offsets of the parts of a workspace, in bytes from its beginning."""

    _fields_ = fields("WorkspaceLayout")

    def slot_offset(self, epoch: int) -> int:
        """Returns the offset of the slot of call `epoch`."""
        slots: int = self.slots
        return slots + epoch % self.slot_count * self.slot_bytes


#: The channels of a group; a channel's number is its index here.
CHANNELS = texts("kChannelNames")
#: The flags of a workspace on a device; a flag's number is its index here.
DEVICE_FLAGS = texts("kFlagNames")
#: The flags that a rank raises at its peers.
FLAGS = DEVICE_FLAGS[: constants()["kFlags"]]
FLAG_BYTES = constants()["kFlagBytes"]
LAST_EPOCH = constants()["kLastEpoch"]
LAST_CPU_EPOCH = constants()["kLastCpuEpoch"]
EXCHANGE_PIECE = constants()["kPieceBytes"]
EXCHANGE_PART = constants()["kPartAlignment"]
MAX_CALL_NAME = constants()["kMaxCallName"]
PAGE_BYTES = constants()["kPageBytes"]
SLOTS = constants()["kSlots"]
CONSTANT_ONE = constants()["kConstantOne"]


def flag_offset(flag: int, writer: int, world_size: int) -> int:
    """Returns the offset of the flag that `writer` raises, from the first flag of its owner."""
    offset: int = load().symm_cp_flag_offset(flag, writer, world_size)
    return offset


def sent_offset(word: int, rank: int, world_size: int) -> int:
    """Returns the offset of a word that streams copy to peers' flags, from the first flag."""
    offset: int = load().symm_cp_sent_offset(word, rank, world_size)
    return offset
