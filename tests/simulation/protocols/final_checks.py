"""What must hold when the faults have ended, and when the job has: progress, answers, and storage without leaks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint.configuration import CheckpointRetention
from ckpt_runtime.scheduler.job_status import JobState
from tests.simulation.file_system import PROTOCOL
from tests.simulation.protocols.files import DIRECTORY, SAVEPOINTS, path_of
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.protocols.world import World

_PROGRESS_WITHIN_MS = 700
_END_WITHIN_MS = 1_600
_EASY_TIMEOUT_MS = 400


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise Violation(message)


def check_progress(world: World) -> None:
    """I19: a while after the last fault the job has ended, or it runs and completes checkpoints."""
    if world.job_has_ended:
        return
    driver = world.present
    _require(driver.process.alive, "no driver leads")
    ended_at = None if driver.deployment is None else driver.deployment.data_ended_at
    timeout_ms = driver.coordinator.configuration.timeout_ms
    # A snapshot that hangs holds up the last checkpoint until it expires.
    waits = ended_at is not None and ended_at < world.loop.now - _END_WITHIN_MS - timeout_ms
    can_end = timeout_ms >= _EASY_TIMEOUT_MS and not world.scenario.lossy
    _require(not waits or not can_end, f"the data ended at {ended_at}, and the job does not end")
    if world.scenario.calm:
        _require(driver.changes.is_settled, "a rescale does not come to an end")
        state = driver.machine.state
        _require(state is JobState.RUNNING, f"the job is stuck in {state.value}")
        since = world.loop.now - _PROGRESS_WITHIN_MS
        last = world.checker.last_completion_at
        _require(last >= since, f"no checkpoint completes since {last}, faults ended at {world.scenario.chaos_ms}")


def check_files(world: World) -> None:
    """I14 and I15 while the job runs: what is retained is whole, and nothing else is left of completed checkpoints."""
    ha, files = world.ha, world.files
    for entry in ha.pointers.values():
        missing = files.missing(entry.checkpoint)
        _require(not missing, f"checkpoint {entry.checkpoint.id} lacks {missing}")
    _check_users_files(world)
    driver = world.present
    if world.job_has_ended or not world.scenario.calm or not driver.checker.has_completed or driver.is_deleting:
        return
    kept = {entry.checkpoint.directory for entry in ha.pointers.values()}
    kept |= {f"{DIRECTORY}/chk-{number}" for number in driver.checker.open}
    leaked = sorted({place for place in _places(world) if place.startswith(f"{DIRECTORY}/chk-")} - kept)
    _require(len(leaked) <= driver.checker.cleaning, f"checkpoints leak: {leaked}")
    used = frozenset[str]().union(*(files.files_of(entry.checkpoint).shared for entry in ha.pointers.values()))
    lowest = min(ha.pointers, default=0)
    unused = {path for path, last in driver.checker.known_shared.items() if last < lowest} - used
    left = sorted(path for path in unused if path.startswith(path_of(DIRECTORY)) and path in files.files)
    _require(not left or bool(driver.checker.cleaning), f"shared files leak: {left}")
    limit = driver.coordinator.configuration.retained + 1 + driver.checker.cleaning
    _require(len(ha.pointers) <= limit, f"{len(ha.pointers)} pointers")


def check_quiet(world: World) -> None:
    """Everything that was begun has ended, and storage holds what outlives the job and nothing else (I15, I20)."""
    driver = world.present
    checker = driver.checker
    # Of a job that is removed the next driver finds the note alone that its clean-up is not done.
    ended = world.ha.result is not None and (not world.ha.result.dirty or not world.ha.job_is_stored)
    _require(ended, "the job has not ended")
    _require(not checker.open, f"checkpoints without an end: {sorted(checker.open)}")
    _require(not checker.requests, f"requests without an answer: {sorted(checker.requests)}")
    _require(not checker.stops, f"stops without an answer: {sorted(checker.stops)}")
    _require(not world.ha.pointers, f"pointers of an ended job: {sorted(world.ha.pointers)}")
    _check_users_files(world)
    _check_leaks(world)


def _check_leaks(world: World) -> None:
    assert world.ha.result is not None
    files = world.files
    checker = world.present.checker
    kept = set(files.savepoints)
    discards = _discards(world.present.coordinator.configuration.retention, world.ha.result.status)
    if not discards:
        newest = checker.outlives
        later = [n for n, stored in world.checker.completed.items() if stored and newest is not None and n >= newest]
        whole = not later or any(files.has_metadata(f"{DIRECTORY}/chk-{number}") for number in later)
        stopped = any(savepoint.id in later for savepoint in files.savepoints.values())
        _require(whole or stopped, f"checkpoint {newest} or a later one should outlive the job")
        kept |= {f"{DIRECTORY}/chk-{number}" for number in checker.released}
    for place in _places(world):
        mine = place in checker.known_directories
        # A savepoint may be complete although its driver has died before it could answer.
        lost = place.startswith(f"{SAVEPOINTS}/") and not files.has_metadata(place)
        _require(place in kept or not (mine or lost), f"{place} leaks: {sorted(files.in_directory(place))}")
    for place in sorted(world.checker.released):
        _require(not files.in_directory(place), f"{place} was to be deleted and is there")
    if discards:
        users = frozenset[str]().union(*files.user_owned.values())
        left = {path for path in checker.known_shared if path in files.files and path not in users}
        if world.origin is not None and files.has_metadata(world.origin.directory):
            # It was claimed, and not replaced before the job ended.
            left -= files.files_of(world.origin).shared
        _require(not left, f"shared files leak: {sorted(left)}")


def _places(world: World) -> set[str]:
    """Directories with files that a living driver knew of, or could have known of."""
    known = (path for path in world.files.files if path not in world.files.orphans and path not in world.files.late)
    return {f"{PROTOCOL}://{path.rpartition('/')[0]}" for path in known}


def _discards(retention: CheckpointRetention, status: str) -> bool:
    """Flink's table of what outlives a job."""
    if status == "FINISHED":
        return True
    if status == "CANCELED":
        return retention is not CheckpointRetention.RETAIN_ON_CANCELLATION
    return retention is CheckpointRetention.NO_EXTERNALIZED_CHECKPOINTS


def _check_users_files(world: World) -> None:
    """I16: a snapshot that is not the job's stays as it is for its whole life; savepoints stay whole."""
    files = world.files
    for directory, content in files.user_owned.items():
        _require(all(path in files.files for path in content), f"the user's {directory} has changed")
    for directory, savepoint in files.savepoints.items():
        missing = files.missing(savepoint)
        _require(not missing, f"savepoint {directory} lacks {missing}")
