"""Processor seconds of each test file: on busy processors they say what a file costs, and the duration does not.

They count the process of the run and what it has started, each process once it has ended and was waited for: those of a
session that several files share are part of the file behind which it ends.
"""

from __future__ import annotations

import os
from collections import defaultdict

import pytest

SHOWN = 15
LEAST_S = 1.0
IN_ALL = "of this group"
"""``scripts/test.sh`` looks for it."""


def used() -> float:
    """Processor seconds of this process and of all that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class ProcessorTimes:
    """A plugin of pytest: the files that cost most, in the report's end."""

    def __init__(self) -> None:
        self._last = 0.0
        self._of_files: dict[str, float] = defaultdict(float)

    def _count_for(self, file: str) -> None:
        now = used()
        self._of_files[file] += now - self._last
        self._last = now

    def pytest_collection_finish(self) -> None:
        self._count_for("imports and collection")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._count_for(nodeid.partition("::")[0])

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        self._count_for("the end of what the folder shares")

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        most = sorted(self._of_files.items(), key=lambda found: -found[1])[:SHOWN]
        terminalreporter.section("most processor seconds")
        for file, seconds in most:
            if seconds >= LEAST_S:
                terminalreporter.line(f"{seconds:8.1f} s {file}")
        terminalreporter.line(f"{used():8.1f} s {IN_ALL}")
