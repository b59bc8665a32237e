"""What the ranks tell each other at each `synchronize()`, in one small all-reduce.

A header is 64 words; all ranks' headers are combined by bitwise or. A word that must be equal
everywhere travels together with its complement: if it is, both come back as they were, and if
it is not, every rank sees one of them changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import torch

_NUM_WORDS: Final = 64
_BITS: Final = 62
"""Bits of a word that are used: it is signed."""
_EQUAL: Final = 3  # call, signature, values: the first six words
_STALE: Final = 2 * _EQUAL
_NOT_FINITE: Final = _STALE + 1
_PRESENT: Final = _NOT_FINITE + 1

MAX_PARAMETERS: Final = (_NUM_WORDS - _PRESENT) * _BITS
"""How many parameters' presence a header can hold (3,472)."""
MAX_BUCKETS: Final = _BITS


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """One rank's view before it is combined, that of all ranks after.

    Attributes:
        call: Which call of `synchronize` this is, from 1.
        signature: Of the parameters and options.
        values: Digest of the parameters' values, where they are compared; else 0.
        stale: Buckets whose gradients have changed since they were reduced.
        not_finite: Whether there is a gradient that is infinite or no number.
        present: Parameters that have a gradient.
    """

    call: int
    signature: int
    values: int
    stale: frozenset[int] = frozenset()
    not_finite: bool = False
    present: frozenset[int] = frozenset()

    def to_tensor(self) -> torch.Tensor:
        """Return the words: int64, shape (64,)."""
        words = [0] * _NUM_WORDS
        for place, word in enumerate((self.call, self.signature, self.values)):
            words[2 * place] = word
            words[2 * place + 1] = ~word
        words[_STALE] = _mask(self.stale)
        words[_NOT_FINITE] = int(self.not_finite)
        for number in self.present:
            words[_PRESENT + number // _BITS] |= 1 << (number % _BITS)
        return torch.tensor(words)


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What came of all headers; the same on every rank, but for what is compared with it.

    Attributes:
        same_call: All are in the same call.
        same_signature: All mean the same parameters and options.
        same_values: All have the same values.
        stale: Buckets that are stale on any rank.
        not_finite: Whether any rank has a gradient that is not finite.
        present: Parameters that have a gradient on any rank.
    """

    same_call: bool
    same_signature: bool
    same_values: bool
    stale: frozenset[int]
    not_finite: bool
    present: frozenset[int]

    @classmethod
    def of(cls, combined: torch.Tensor, own: Header) -> Agreement:
        """Read the combined words."""
        words = combined.tolist()
        same = [
            words[2 * place] == word and words[2 * place + 1] == ~word
            for place, word in enumerate((own.call, own.signature, own.values))
        ]
        return cls(
            same_call=same[0],
            same_signature=same[1],
            same_values=same[2],
            stale=frozenset(_numbers(words[_STALE])),
            not_finite=bool(words[_NOT_FINITE]),
            present=frozenset(
                place * _BITS + bit
                for place, word in enumerate(words[_PRESENT:])
                for bit in _numbers(word)
            ),
        )


def _mask(numbers: Iterable[int]) -> int:
    mask = 0
    for number in numbers:
        mask |= 1 << number
    return mask


def _numbers(mask: int) -> list[int]:
    return [bit for bit in range(_BITS) if mask >> bit & 1] if mask else []
