"""Processes of this machine, as ``/proc`` shows them."""

from __future__ import annotations

from pathlib import Path


def children(pid: int) -> list[int]:
    """All living descendants of a process."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            fields = _stat(int(entry.name))
            if fields is not None and fields[0] != "Z":
                parents[int(entry.name)] = int(fields[1])
    found: list[int] = []
    wanted = {pid}
    while wanted:
        wanted = {child for child, parent in parents.items() if parent in wanted}
        found += sorted(wanted)
    return found


def living(pids: list[int]) -> list[int]:
    """Those that still run; zombies do not."""
    return [pid for pid in pids if (fields := _stat(pid)) is not None and fields[0] != "Z"]


def command_line(pid: int) -> str:
    """Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """State, parent and what follows."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
