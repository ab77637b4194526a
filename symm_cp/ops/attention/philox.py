"""The random numbers of attention dropout: functions of positions, not of the rank.

Philox4x32 with 7 rounds turns a counter of 4 words of 32 bits, under a key of 2 words, into 4
random words. The key is the seed, its low word first. A counter belongs to 8 keys of one query,
head and sample, all numbered in the whole problem:

    word 0    number of the block of 128 keys, times 16, plus k % 16: k // 128 * 16 + k % 16
    word 1    position of the query
    word 2    head
    word 3    sample

The key at position k takes number k % 128 // 16 of the eight 16-bit numbers of its counter: 0 to 3
are the low halves of the words, 4 to 7 the high halves. So 16 counters side by side give 128 keys
in order. A weight is kept when its number is at least `threshold(p)`.

csrc/attention/philox.h computes the same bits. Source: Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3" (2011).
"""

from __future__ import annotations

import torch

ROUNDS = 7
_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def threshold(p: float) -> int:
    """Returns how many of the 65536 random numbers drop a weight: `p` to the nearest 2^-16."""
    return round(p * 65536)


def philox(counter: Words, seed: int, rounds: int = ROUNDS) -> Words:
    """Returns four random words for each counter; words are int64 tensors of 32 bits each."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(rounds):
        # The products wrap around in int64, which keeps all their 64 bits correct.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = (second >> 32 & _WORD) ^ c1 ^ k0
        c2 = (first >> 32 & _WORD) ^ c3 ^ k1
        c1, c3 = second & _WORD, first & _WORD
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return c0, c1, c2, c3


def kept(
    samples: torch.Tensor,
    heads: torch.Tensor,
    query_positions: torch.Tensor,
    key_positions: torch.Tensor,
    *,
    p: float,
    seed: int,
) -> torch.Tensor:
    """Returns which weights dropout keeps, (B, H, S, K); all four arguments are int64 vectors."""
    shape = (len(samples), len(heads), len(query_positions), len(key_positions))
    counter = (
        (key_positions // 128 * 16 + key_positions % 16) & _WORD,
        query_positions.view(-1, 1) & _WORD,
        heads.view(-1, 1, 1) & _WORD,
        samples.view(-1, 1, 1, 1) & _WORD,
    )
    words = philox(tuple(word.expand(shape) for word in counter), seed)  # type: ignore[arg-type]
    piece = key_positions % 128 // 16
    number = words[0]
    for index in (1, 2, 3):
        number = torch.where(piece % 4 == index, words[index], number)
    return (number >> piece // 4 * 16 & 0xFFFF) >= threshold(p)
