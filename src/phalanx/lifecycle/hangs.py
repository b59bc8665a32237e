"""Which rank hangs, if any: a pure judgement on when each was seen last, and where it is.

A collective stops everybody who is in it, so of many silent ranks usually one is the cause. Ranks
that wait for others are innocent as long as another explains the silence.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sighting:
    """What is known of a rank that runs.

    Attributes:
        rank: Global rank.
        since_s: When it gave its last sign of life; for one that never noted any: when the
            group did.
        num_signs: How often it has noted that it got on.
        is_stuck: It can't answer, for it is stopped, or in the kernel.
        waits: It waits for other ranks.
    """

    rank: int
    since_s: float
    num_signs: int = 0
    is_stuck: bool = False
    waits: bool = False


def silent_ranks(sightings: Sequence[Sighting], timeout_s: float, now: float) -> list[Sighting]:
    """Return those that have given no sign for too long."""
    return [seen for seen in sightings if now - seen.since_s >= timeout_s]


def find_hung(sightings: Sequence[Sighting], timeout_s: float, now: float) -> Sighting | None:
    """Return the rank that the silence is put down to, or None while nobody is to blame.

    If all that have been silent too long wait for others, those others are given time to become
    silent, too: as much again, since a rank may wait for ever while others go on.
    """
    late = silent_ranks(sightings, timeout_s, now)
    culprits = [seen for seen in late if seen.is_stuck or not seen.waits]
    if not culprits:
        all_late = len(late) == len(sightings)
        culprits = late if all_late else silent_ranks(late, 2 * timeout_s, now)
    return min(culprits, key=_innocence, default=None)


def next_look(sightings: Sequence[Sighting], timeout_s: float, now: float) -> float:
    """Return in how many seconds to look again: not before a quarter of the timeout."""
    dues = [seen.since_s + timeout_s - now for seen in sightings]
    dues += [due + timeout_s for due in dues]  # see `find_hung`
    return max(min((due for due in dues if due > 0), default=timeout_s), timeout_s / 4)


def _innocence(seen: Sighting) -> tuple[bool, bool, bool, int, float, int]:
    """The least is the culprit.

    A rank that never noted anything may well be a server that has nothing to do, so one that
    stopped noting comes before it.
    """
    return (
        not seen.is_stuck,
        seen.waits and not seen.is_stuck,
        not seen.num_signs,
        seen.num_signs,
        seen.since_s,
        seen.rank,
    )
