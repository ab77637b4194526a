"""Reductions and copies of csrc/, to the last bit, against torch: types, operators, addresses."""

from __future__ import annotations

import ctypes
import itertools
import math
import platform
import random
import shlex
import subprocess
from collections.abc import Callable, Sequence
from functools import reduce
from pathlib import Path

import pytest
import torch

from symm_cp import native
from symm_cp.native.wire import DType, ReduceOp
from tests.exhaustive import exhaustive

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
TYPES = {
    dtype: DType[str(dtype).removeprefix("torch.").upper()]
    for dtype in (*FLOATS, *INTEGERS, *COMPLEX, torch.bool)
}
BITWISE = {ReduceOp.BAND, ReduceOp.BOR, ReduceOp.BXOR}
#: Bytes around the output, which must not change.
GUARD = 64


def operators(dtype: torch.dtype) -> set[ReduceOp]:
    """The reductions of a dtype that gloo has, and averages of numbers."""
    if dtype in COMPLEX:
        return {ReduceOp.SUM, ReduceOp.AVG}
    if dtype is torch.bool:
        return set(ReduceOp) - {ReduceOp.AVG}
    return set(ReduceOp) - (BITWISE if dtype in FLOATS else set())


def _lesser(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((b < a) | (b != b), b, a)


def _greater(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((b > a) | (b != b), b, a)


COMBINE: dict[ReduceOp, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    ReduceOp.SUM: torch.add,
    ReduceOp.AVG: torch.add,
    ReduceOp.PRODUCT: torch.mul,
    ReduceOp.MIN: _lesser,
    ReduceOp.MAX: _greater,
    ReduceOp.BAND: torch.bitwise_and,
    ReduceOp.BOR: torch.bitwise_or,
    ReduceOp.BXOR: torch.bitwise_xor,
}


def expected(sources: Sequence[torch.Tensor], op: ReduceOp) -> torch.Tensor:
    """Reduces in rank order: 16-bit floats in float32, rounded once; complex numbers by parts."""
    dtype = sources[0].dtype
    if dtype in COMPLEX:  # torch multiplies them by a complex 1 when it adds: inf becomes NaN
        return torch.view_as_complex(expected([torch.view_as_real(x) for x in sources], op))
    wide = [x.float() if dtype in (torch.float16, torch.bfloat16) else x for x in sources]
    result = reduce(COMBINE[op], wide)
    if op != ReduceOp.AVG:
        return result.to(dtype)
    if dtype in FLOATS:
        return (result / len(sources)).to(dtype)
    return result.div(len(sources), rounding_mode="trunc")  # of a sum that wraps


def numbers(dtype: torch.dtype, elements: int) -> torch.Tensor:
    """Random bits, including denormals, infinities and NaN, among numbers of usual size."""
    if dtype == torch.bool:
        return torch.rand(elements) < 0.5
    if dtype in COMPLEX:
        part = torch.float32 if dtype == torch.complex64 else torch.float64
        return torch.complex(numbers(part, elements), numbers(part, elements))
    random_bits = torch.randint(0, 256, (elements * dtype.itemsize,), dtype=torch.uint8)
    bits = random_bits.view(dtype)
    if dtype in INTEGERS:
        return bits
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0]).to(dtype)
    picked = special[torch.randint(0, len(special), (elements,))]
    kind = torch.randint(0, 10, (elements,))
    usual = torch.randn(elements, dtype=torch.float64).to(dtype)
    return torch.where(kind == 0, picked, torch.where(kind < 4, bits, usual))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether all elements have the same bits, or are both NaN."""
    if a.dtype in COMPLEX:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    equal = (a.view(torch.uint8) == b.view(torch.uint8)).view(*a.shape, a.itemsize).all(-1)
    return bool((equal | ((a != a) & (b != b))).all())


class Memory:
    """The bytes of a tensor at an address of a given remainder, between guards."""

    def __init__(self, tensor: torch.Tensor, shift: int) -> None:
        data = tensor.reshape(-1).view(torch.uint8) if tensor.numel() else torch.empty(0).byte()
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._whole = torch.full((len(data) + 2 * GUARD + 64,), 0xA5, dtype=torch.uint8)
        self._begin = GUARD + (shift - self._whole.data_ptr() - GUARD) % 64
        self._end = self._begin + len(data)
        self._whole[self._begin : self._end] = data

    @property
    def address(self) -> int:
        return self._whole.data_ptr() + self._begin

    def tensor(self) -> torch.Tensor:
        return self._whole[self._begin : self._end].clone().view(self._dtype).view(self._shape)

    def is_guarded(self) -> bool:
        around = torch.cat([self._whole[: self._begin], self._whole[self._end :]])
        return bool((around == 0xA5).all())


def check_reduction(
    library: ctypes.CDLL, dtype: torch.dtype, op: ReduceOp, count: int, streaming: bool
) -> None:
    """Reduces a random number of elements at random addresses; `out` may be a source."""
    elements = random.choice((0, 1, random.randrange(2, 40), random.randrange(40, 1200)))
    aligned = random.random() < 0.3
    sources = [numbers(dtype, elements) for _ in range(count)]
    places = [Memory(x, 0 if aligned else random.randrange(64)) for x in sources]
    out = Memory(torch.zeros(elements, dtype=dtype), 0 if aligned else random.randrange(64))
    if random.random() < 0.3:
        out = random.choice(places)
    addresses = (ctypes.c_void_p * count)(*(place.address for place in places))
    status = library.symm_cp_reduce(
        out.address, addresses, count, elements, TYPES[dtype], op, streaming
    )
    described = f"{dtype} {op.name} of {count} x {elements}, {streaming=}"
    assert status == 0, described
    assert same_bits(out.tensor(), expected(sources, op)), described
    for place, source in zip(places, sources, strict=True):
        assert place.is_guarded(), described
        assert place is out or same_bits(place.tensor(), source), described
    assert out.is_guarded(), described


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_a_reduction_is_torchs_in_rank_order(dtype: torch.dtype) -> None:
    library = native.load()
    for op, count, streaming in itertools.product(operators(dtype), range(1, 6), (False, True)):
        for _ in range(3):
            check_reduction(library, dtype, op, count, streaming)


def test_bools_are_true_unless_their_byte_is_0() -> None:
    """As when torch views bytes as bools; results are 0 or 1."""
    values = [torch.randint(0, 3, (100,), dtype=torch.uint8) for _ in range(2)]
    places, out = [Memory(x, 0) for x in values], Memory(torch.zeros(100, dtype=torch.uint8), 0)
    addresses = (ctypes.c_void_p * 2)(*(place.address for place in places))
    for op in operators(torch.bool):
        native.load().symm_cp_reduce(out.address, addresses, 2, 100, DType.BOOL, op, False)
        want = expected([x != 0 for x in values], op)
        assert torch.equal(out.tensor(), want.view(torch.uint8)), op


def test_what_is_not_reducible_is_refused() -> None:
    library = native.load()
    source = Memory(torch.zeros(4, dtype=torch.complex128), 0)
    addresses = (ctypes.c_void_p * 1)(source.address)
    float8 = 24  # torch's number of the type
    pairs = [(number, operators(dtype)) for dtype, number in TYPES.items()]
    for number, allowed in [*pairs, (float8, set())]:
        for op in ReduceOp:
            assert library.symm_cp_reducible(number, op) == (op in allowed), (number, op)
            status = library.symm_cp_reduce(source.address, addresses, 1, 4, number, op, 0)
            assert status == (0 if op in allowed else -1), (number, op)
            if op not in allowed:
                assert f"scalar type {number} has no reduction {op:d}" in native.error()


@pytest.mark.parametrize("streaming", [False, True])
def test_copies_are_whole_and_nothing_else(streaming: bool) -> None:
    library = native.load()
    for limit in (8, 200, 3000, 40_000):
        for _ in range(20):
            source = Memory(numbers(torch.uint8, random.randrange(limit)), random.randrange(64))
            target = Memory(torch.zeros_like(source.tensor()), random.choice((0, 1, 32, 63)))
            length = len(source.tensor())
            library.symm_cp_copy(target.address, source.address, length, streaming)
            assert torch.equal(target.tensor(), source.tensor())
            assert target.is_guarded()


_ENTRY = """
#include "exchange/reduce.h"
extern "C" int64_t symm_cp_reduce(void* out, const void* const* sources, int count,
                                  int64_t elements, int dtype, int op, int streaming) {
  symm_cp::reduce(out, sources, count, elements, static_cast<symm_cp::DType>(dtype),
                  static_cast<symm_cp::ReduceOp>(op), streaming != 0);
  return 0;
}
"""


def _levels() -> list[list[str]]:
    """Options for the instruction sets that this processor has."""
    if platform.machine() != "x86_64":
        return [[]]
    flags = Path("/proc/cpuinfo").read_text().split()
    levels = [["-march=x86-64"]]
    if {"avx2", "f16c", "fma"} <= set(flags):
        levels.append(["-march=haswell"])
    if {"avx512bw", "avx512dq", "avx512vl"} <= set(flags):
        levels.append(["-march=skylake-avx512"])
    return levels


@exhaustive
@pytest.mark.parametrize("level", _levels(), ids=" ".join)
def test_every_instruction_set_gives_the_same_bits(level: list[str], tmp_path: Path) -> None:
    entry, target = tmp_path / "entry.cpp", tmp_path / "reduce.so"
    entry.write_text(_ENTRY)
    folder = native.source_dir()
    options = ["-std=c++20", "-O2", *level, "-fPIC", "-shared", f"-I{folder}"]
    compiler = shlex.split(native.find_compiler())
    files = ("exchange/reduce.cpp", "base/team.cpp")
    sources = [str(entry), *(str(folder / name) for name in files)]
    subprocess.run([*compiler, *options, *sources, "-o", str(target)], check=True)
    library = ctypes.CDLL(str(target))
    library.symm_cp_reduce.argtypes = native.load().symm_cp_reduce.argtypes
    library.symm_cp_reduce.restype = ctypes.c_int64
    for dtype in TYPES:
        for op, count, streaming in itertools.product(operators(dtype), range(1, 6), (False, True)):
            check_reduction(library, dtype, op, count, streaming)
