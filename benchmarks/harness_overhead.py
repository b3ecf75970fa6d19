"""What the harness itself adds, measured with an engine that does nothing: `python benchmarks/harness_overhead.py`.

Requests go through everything that a measured one goes through: dispatcher, pipe, the replica's process, stamps.
Exits with 1 beyond the limits of 50 us a token and 1 ms a request.
"""

from __future__ import annotations

import sys

from skote.eval.harness import measure_overhead
from skote.runtime.dispatch import ReplicaDispatcher
from skote.runtime.replica import Replica
from skote.types import EngineSpec

MAX_US_PER_TOKEN = 50.0
MAX_MS_PER_REQUEST = 1.0


def main() -> None:
    """Measure once, print the two medians, and judge them."""
    spec = EngineSpec("skote.engines.simulated.SimulatedEngine")
    with Replica(spec, index=0, device="cpu") as replica, ReplicaDispatcher([replica], "round_robin") as dispatcher:
        replica.wait_ready(60.0)
        overhead = measure_overhead(dispatcher)
    us, ms = overhead["us_per_token"], overhead["ms_per_request"]
    within = us <= MAX_US_PER_TOKEN and ms <= MAX_MS_PER_REQUEST
    print(f"{us:.1f} us per token (limit {MAX_US_PER_TOKEN:.0f})")
    print(f"{ms:.3f} ms per request (limit {MAX_MS_PER_REQUEST:.0f})")
    sys.exit(0 if within else 1)


if __name__ == "__main__":
    main()
