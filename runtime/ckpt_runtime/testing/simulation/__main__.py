"""``python -m ckpt_runtime.testing.simulation``: schedules of a job's protocols."""

from __future__ import annotations

import sys

from ckpt_runtime.testing.schedules.command_line import command_line
from ckpt_runtime.testing.simulation.schedules import PROTOCOLS

if __name__ == "__main__":
    sys.exit(command_line(PROTOCOLS))
