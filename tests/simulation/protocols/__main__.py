"""``python -m tests.simulation.protocols``: schedules of a job's protocols."""

from __future__ import annotations

import sys

from tests.simulation.protocols.schedules import PROTOCOLS
from tests.simulation.schedules.command_line import command_line

if __name__ == "__main__":
    sys.exit(command_line(PROTOCOLS))
