"""Process entry of one slot agent outside Spark; its parameters are a JSON line on standard input.

With a descriptor on the command line, it is instead the entry of a template for many agents.
"""

from __future__ import annotations

import socket
import sys

import msgspec

from ckpt_runtime.spark.slot_agent import AgentParameters, run_agent
from ckpt_runtime.testing.agent_template import serve_agents


def main() -> None:
    """Run a template, or one agent until its driver ends."""
    if len(sys.argv) > 1:
        serve_agents(socket.socket(fileno=int(sys.argv[1])))
    else:
        run_agent(msgspec.json.decode(sys.stdin.readline(), type=AgentParameters))


if __name__ == "__main__":
    main()
