"""Process entry of one slot agent outside Spark; its parameters come as a JSON line on standard input."""

from __future__ import annotations

import sys

import msgspec

from ckpt_runtime.spark.slot_agent import AgentParameters, run_agent


def main() -> None:
    """Runs one agent until its driver ends."""
    run_agent(*msgspec.json.decode(sys.stdin.readline(), type=tuple[AgentParameters, int]))


if __name__ == "__main__":
    main()
