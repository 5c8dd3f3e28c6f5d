"""``python -m tests.simulation.jobs``: schedules of whole jobs."""

from __future__ import annotations

import sys

from tests.simulation.jobs.schedules import JOBS
from tests.simulation.schedules.command_line import command_line

if __name__ == "__main__":
    sys.exit(command_line(JOBS))
