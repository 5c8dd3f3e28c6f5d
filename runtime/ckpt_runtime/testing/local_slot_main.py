"""Process entry of one slot agent outside Spark; its parameters come as a JSON line on standard input."""

from __future__ import annotations

import json
import sys

from ckpt_runtime.spark.slot_agent import AgentParameters, run_agent


def main() -> None:
    """Runs one agent until its driver ends."""
    start = json.loads(sys.stdin.readline())
    run_agent(AgentParameters(start["host"], start["port"], start["secret"], start["stage"]), start["index"])


if __name__ == "__main__":
    main()
