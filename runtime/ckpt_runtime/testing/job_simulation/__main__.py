"""``python -m ckpt_runtime.testing.job_simulation``: schedules of whole jobs."""

from __future__ import annotations

import sys

from ckpt_runtime.testing.job_simulation.schedules import JOBS
from ckpt_runtime.testing.schedules.command_line import command_line

if __name__ == "__main__":
    sys.exit(command_line(JOBS))
