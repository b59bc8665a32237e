"""How a run is to be healed and ended: what the lifecycle decides by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """What the launch asked for, as far as the lifecycle needs to know it."""

    world_size: int
    max_restarts: int = 0
    restart_window_s: float | None = None
    restart: Literal["group", "worker"] = "group"
    grace_s: float = 30.0
    start_timeout_s: float = 300.0
    runs_program: bool = False
    """Workers may be other programs: to end with exit code 0 is to return."""
