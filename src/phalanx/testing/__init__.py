"""For tests, ours and yours: time, processes and faults under control.

- `FakeClock` and `FakeProcesses` play whole runs through the real lifecycle, crashes and
  restarts included, without a process and without waiting.
- `FaultInjector` makes real workers fail at a given rank and step.
"""

from phalanx.testing.clock import FakeClock
from phalanx.testing.faults import FaultInjector, InjectedFaultError
from phalanx.testing.processes import FakeProcesses

__all__ = ["FakeClock", "FakeProcesses", "FaultInjector", "InjectedFaultError"]
