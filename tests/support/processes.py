"""Processes of this machine, as ``/proc`` shows them."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

from ckpt_runtime.processes.handles import TEMPLATE, WORKER


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


def parent(pid: int) -> int:
    """Raises LookupError for a process that is gone."""
    fields = _stat(pid)
    if fields is None:
        raise LookupError(f"process {pid} is gone")
    return int(fields[1])


def members(session_pid: int) -> list[int]:
    """All living processes of the session that one leads, also those that init has taken over."""
    pids = sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [
        pid for pid in pids if (fields := _stat(pid)) is not None and fields[0] != "Z" and fields[3] == str(session_pid)
    ]


def living(pids: list[int]) -> list[int]:
    """Those that still run; zombies do not."""
    return [pid for pid in pids if (fields := _stat(pid)) is not None and fields[0] != "Z"]


def command_line(pid: int) -> str:
    """Empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def command_name(pid: int) -> str:
    """What the process calls itself; empty for one that is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def _stat(pid: int) -> list[str] | None:
    """State, parent and what follows."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None


def workers_of(session_pid: int, file: Path) -> list[int]:
    """Worker processes of a session which have a file open: those that run a job that reads it."""
    return [pid for pid in members(session_pid) if command_name(pid) == WORKER and file in _open_files(pid)]


def agent_of(worker: int) -> int:
    """The slot agent that started or adopted a worker. Raises LookupError when there is none."""
    fields = _stat(worker)
    if fields is None:
        raise LookupError(f"process {worker} is gone")
    session = int(fields[3])
    for pid in members(session):
        if command_name(pid) not in (WORKER, TEMPLATE) and worker in _held(pid):
            return pid
    raise LookupError(f"worker {worker} has no agent")


def _held(pid: int) -> set[int]:
    """The processes of which one has a descriptor."""
    found = set()
    try:
        for file in Path(f"/proc/{pid}/fdinfo").iterdir():
            try:
                found |= {int(line[4:]) for line in file.read_text().splitlines() if line.startswith("Pid:")}
            except OSError:
                continue
    except OSError:
        return set()
    return found


def _open_files(pid: int) -> set[Path]:
    found = set()
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                found.add(entry.readlink())
            except OSError:
                continue
    except OSError:
        return set()
    return found


_PIDFD_GETFD = 438


def cut_connections(one: int, other: int) -> int:
    """Ends the TCP connections between two processes, which both live on; gives how many there were."""
    return _with_connections(one, other, lambda connection: connection.shutdown(socket.SHUT_RDWR))


_SO_ATTACH_FILTER = 26
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)
"""A filter of one instruction: return 0, of each packet nothing is let through."""


def silence_connections(one: int, other: int) -> int:
    """The present TCP connections between two processes stay, and no packet arrives any more; gives how many."""

    def silence(connection: socket.socket) -> None:
        instruction = ctypes.create_string_buffer(_DROP_ALL)
        program = struct.pack("HL", 1, ctypes.addressof(instruction))
        connection.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    count = _with_connections(one, other, silence)
    assert _with_connections(other, one, silence) == count
    return count


def _with_connections(one: int, other: int, act: Callable[[socket.socket], None]) -> int:
    """Those of the first process to the second one."""
    towards_one = {(remote, local) for local, remote, _ in _connections(other)}
    found = [inode for local, remote, inode in _connections(one) if (local, remote) in towards_one]
    for entry, target in _descriptors(one):
        if target in {f"socket:[{inode}]" for inode in found}:
            _with_socket(one, int(entry.name), act)
    return len(found)


def _descriptors(pid: int) -> Iterator[tuple[Path, str]]:
    """The open ones of a process, which opens and closes others meanwhile, and what they are."""
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            yield entry, str(entry.readlink())
        except FileNotFoundError:
            continue


def _connections(pid: int) -> list[tuple[str, str, str]]:
    """Local address, remote address and inode, as the kernel writes them."""
    inodes = {target for _, target in _descriptors(pid)}
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [(line[1], line[2], line[9]) for line in lines if f"socket:[{line[9]}]" in inodes]


def _with_socket(pid: int, descriptor: int, act: Callable[[socket.socket], None]) -> None:
    """The same socket, of which this process gets a descriptor of its own for a moment."""
    process = os.pidfd_open(pid)
    try:
        copied = ctypes.CDLL(None, use_errno=True).syscall(_PIDFD_GETFD, process, descriptor, 0)
        if copied < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        with socket.socket(fileno=copied) as connection:
            act(connection)
    finally:
        os.close(process)
