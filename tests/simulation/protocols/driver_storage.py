"""How a simulated driver uses storage: each durable write in its steps, with every way in which it can go wrong.

A write of high availability: the fence is asked, the request goes out, takes effect (or not, or later than its answer),
the answer comes, the fence is asked again. A crash or a pause may fall between any two of these.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING

from ckpt_runtime.checkpoint import effects as out
from ckpt_runtime.checkpoint import events as on
from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.events import CoordinatorEvent
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.scheduler import core_events as core
from tests.simulation.protocols.storage import METADATA, JobResult
from tests.simulation.protocols.tasks import CAUSE
from tests.simulation.schedules.violation import Violation

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver

_RETRY_MS = 15


class Outcome(Enum):
    """What a writer hears."""

    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"


def _ignored(outcome: Outcome) -> None:
    """A deletion that is noted for longer than it has to be is done again."""


class StorageShell:
    """Storage as one driver uses it."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._world = driver.world
        self._under_way: set[str] = set()
        self.deleting = 0
        self._keeping = False

    # --- one durable write

    def write(
        self,
        what: str,
        effect: Callable[[], bool],
        answer: Callable[[Outcome], None],
        *,
        fenced: bool = True,
        faults: float = 0.06,
    ) -> None:
        """``effect`` returns False when the store refuses; it may come after the answer. ``fenced``: in HA."""
        world, driver = self._world, self._driver
        world.crash_point(driver, f"before {what}")
        fence = driver.fence() if fenced else True
        if fence is None:
            world.loop.at(world.loop.now + 1, driver.process, answer, Outcome.FAILED)
            return
        if not fence:
            driver.lost_leadership()
            return
        loop, choices = world.loop, world.choices
        landing = loop.now + choices.delay("write", 1, 10)
        told = Outcome.DONE
        takes_effect = True
        if choices.fault(f"{what.rstrip('0123456789 ')} goes wrong", faults):
            how = choices.pick("how a write goes wrong", ("failed", "failed", "done", "not done", "late"))
            told = Outcome.FAILED if how == "failed" else Outcome.UNKNOWN
            takes_effect = how in ("done", "late")
            if how == "late":
                self._under_way.add(what)
                loop.at(landing + choices.delay("late write", 20, 200), None, self._late, what, effect)
                takes_effect = False
        # Half of the requests are on the wire already when their driver crashes or pauses.
        sender = None if choices.chance("request is on its way", 0.5) else driver.process
        refused: list[bool] = []
        if takes_effect:
            loop.at(landing, sender, lambda: refused.append(True) if not effect() else None)
        loop.at(landing + 1, driver.process, self._answered, what, answer, told, refused, fenced)

    def _late(self, what: str, effect: Callable[[], bool]) -> None:
        self._under_way.discard(what)
        effect()

    def _answered(
        self, what: str, answer: Callable[[Outcome], None], told: Outcome, refused: list[bool], fenced: bool
    ) -> None:
        self._world.crash_point(self._driver, f"after {what}")
        fence = self._driver.fence() if fenced else True
        if fence is not None and not fence:
            self._driver.lost_leadership()
            return
        if fence is None and told is Outcome.DONE:
            told = Outcome.UNKNOWN
        answer(Outcome.FAILED if refused else told)
        self._world.crash_point(self._driver, f"answered {what}")

    def _tell_later(self, delay: int, event: CoordinatorEvent) -> None:
        self._world.loop.at(self._world.loop.now + delay, self._driver.process, self._driver.tell, event)

    # --- locations and metadata

    def initialize_location(self, effect: out.InitializeLocation) -> None:
        number = effect.checkpoint_id
        if effect.properties.is_savepoint:
            directory = f"savepoints/{number}-{self._driver.epoch}"
        else:
            directory = f"chk-{number}"
        choices = self._world.choices
        delay = choices.delay("location", 1, 200 if choices.fault("location is slow", 0.05) else 10)
        if choices.fault("no location", 0.15 if effect.properties.is_synchronous else 0.02):
            if choices.chance("location is there", 0.5):
                self._world.files.make_directory(directory)
                self._world.files.half_made.add(directory)
            self._tell_later(delay, on.LocationFailed(number, "simulated"))
            return
        self._world.crash_point(self._driver, "before location")
        self._world.files.make_directory(directory)
        self._tell_later(delay, on.LocationReady(number, directory))

    def write_metadata(self, effect: out.WriteMetadata) -> None:
        self._write_metadata(effect.checkpoint, resolving=False)

    def _write_metadata(self, checkpoint: CompletedCheckpoint, *, resolving: bool) -> None:
        self.write(
            f"metadata {checkpoint.id}",
            partial(self._publish, checkpoint),
            partial(self._metadata_answered, checkpoint.id, resolving),
            fenced=False,
        )

    def _publish(self, checkpoint: CompletedCheckpoint) -> bool:
        files = self._world.files.directories.get(checkpoint.directory)
        if files is None or METADATA in files:
            return False
        files.add(METADATA)
        if checkpoint.is_savepoint:
            self._world.published[checkpoint.directory] = checkpoint
        missing = self._world.files.missing(checkpoint)
        if missing and self._driver.leads:
            raise Violation(f"metadata of checkpoint {checkpoint.id} refers to files that are not there: {missing}")
        return True

    def _metadata_answered(self, number: int, resolving: bool, outcome: Outcome) -> None:
        if outcome is Outcome.DONE:
            self._driver.tell(on.MetadataWritten(number))
        elif outcome is Outcome.UNKNOWN or (resolving and f"metadata {number}" in self._under_way):
            self._driver.tell(on.MetadataUnknown(number))
        else:
            self._driver.tell(on.MetadataFailed(number, "simulated"))

    def resolve_metadata(self, effect: out.ResolveMetadata) -> None:
        checkpoint = effect.checkpoint
        if METADATA in self._world.files.directories.get(checkpoint.directory, ()):
            self._tell_later(2, on.MetadataWritten(checkpoint.id))
        else:
            at = self._world.loop.now + _RETRY_MS
            self._world.loop.at(at, self._driver.process, lambda: self._write_metadata(checkpoint, resolving=True))

    # --- pointers

    def add_to_store(self, effect: out.AddToStore) -> None:
        self._add(effect.checkpoint, effect.owned, resolving=False)

    def _add(self, checkpoint: CompletedCheckpoint, owned: bool, *, resolving: bool) -> None:
        entry = RetainedCheckpoint(checkpoint, owned)
        self.write(
            f"pointer {checkpoint.id}",
            partial(self._world.add_pointer, self._driver, entry),
            partial(self._pointer_answered, checkpoint.id, resolving),
        )

    def _pointer_answered(self, number: int, resolving: bool, outcome: Outcome) -> None:
        """Once an outcome was unknown, the failure of another attempt does not tell what became of the first."""
        if outcome is Outcome.DONE:
            self._driver.tell(on.StoreAdded(number))
        elif outcome is Outcome.UNKNOWN or resolving:
            self._driver.tell(on.StoreUnknown(number))
        else:
            self._driver.tell(on.StoreFailed(number, "simulated"))

    def resolve_store(self, effect: out.ResolveStore) -> None:
        if effect.checkpoint.id in self._world.ha.pointers and self._driver.leads:
            at = self._world.loop.now + 2
            self._world.loop.at(at, self._driver.process, self._pointer_found, effect.checkpoint.id)
            return
        at = self._world.loop.now + _RETRY_MS
        self._world.loop.at(
            at, self._driver.process, lambda: self._add(effect.checkpoint, effect.owned, resolving=True)
        )

    def _pointer_found(self, number: int) -> None:
        """The fence is asked behind a look as well: the driver may have been paused in the midst of it."""
        if self._driver.leads:
            self._driver.tell(on.StoreAdded(number))
        else:
            self._driver.lost_leadership()

    def remove_from_store(self, effect: out.RemoveFromStore) -> None:
        number = effect.checkpoint_id
        disposal = None if effect.discards == f"chk-{number}" else effect.discards
        self.write(
            f"removal {number}",
            partial(self._removed, number, disposal),
            lambda outcome: self._driver.tell(
                on.StoreRemoved(number) if outcome is Outcome.DONE else on.StoreRemoveFailed(number)
            ),
        )

    def _removed(self, number: int, disposal: str | None) -> bool:
        world = self._world
        if disposal is not None and number in world.ha.pointers and self._driver.epoch >= world.ha.removals_of:
            world.checker.released.add(disposal)
        return world.remove_pointer(self._driver, number, disposal)

    # --- deletions

    def dispose(self) -> None:
        """What earlier drivers noted and did not get to."""
        for number, directory in sorted(self._world.ha.disposals.items()):
            delete = partial(self._world.files.delete_directory, directory)
            self._delete_later(f"discard {number}", delete, None, noted=number)

    def _delete_later(
        self, what: str, delete: Callable[[], None], answer: CoordinatorEvent | None, noted: int | None = None
    ) -> None:
        self._world.crash_point(self._driver, f"before {what}")
        self.deleting += 1
        at = self._world.loop.now + self._world.choices.delay("deletion", 1, 12)
        self._world.loop.at(at, self._driver.process, self._delete, what, delete, answer, noted)

    def _delete(
        self, what: str, delete: Callable[[], None], answer: CoordinatorEvent | None, noted: int | None
    ) -> None:
        delete()
        self.deleting -= 1
        self._world.crash_point(self._driver, f"after {what}")
        if noted in self._world.ha.disposals:
            self.write(f"settling {noted}", partial(self._world.settle, noted), _ignored)
        if answer is not None and not self._driver.shut_down:
            self._driver.tell(answer)

    def discard_checkpoint(self, effect: out.DiscardCheckpoint) -> None:
        checkpoint = effect.checkpoint
        if checkpoint.id in self._world.ha.pointers and checkpoint.id not in self._world.ha.stale:
            raise Violation(f"the files of checkpoint {checkpoint.id} go before its pointer")
        delete = partial(self._world.files.delete_directory, checkpoint.directory)
        self._delete_later(f"discard {checkpoint.id}", delete, on.CleanupDone(checkpoint.id), noted=checkpoint.id)

    def discard_location(self, effect: out.DiscardLocation) -> None:
        delete = partial(self._world.files.delete_directory, effect.directory)
        self._delete_later(f"discard {effect.checkpoint_id}", delete, on.CleanupDone(effect.checkpoint_id))

    def discard_state(self, effect: out.DiscardState) -> None:
        names = [file.path for file in effect.state.files() if not file.path.startswith("/")]
        delete = partial(self._world.files.delete_files, effect.directory, names)
        self._delete_later("state", delete, None)

    def delete_shared(self, effect: out.DeleteSharedFiles) -> None:
        self._delete_later("shared files", partial(self._world.files.delete_shared, effect.paths), None)

    def find_leftovers(self, effect: out.FindLeftovers) -> None:
        files = self._world.files
        numbers = sorted(int(name[4:]) for name in files.directories if name.startswith("chk-"))
        found = tuple((number, f"chk-{number}") for number in numbers) if effect.below is None else ()
        shared = sorted(
            path
            for path in files.shared - files.user_shared
            if effect.below is None or (path.startswith("/shared/") and int(path.rpartition("-")[2]) < effect.below)
        )
        self._tell_later(3, on.LeftoversFound(found, tuple(shared)))

    # --- failures

    def keep_failures(self) -> None:
        """One write after the other, as long as there is something new."""
        if not self._keeping:
            self._keeping = True
            kept = tuple(self._driver.failures)
            keep = partial(self._world.keep_failures, kept, self._world.ha.failures_revision)
            self.write("failures", keep, partial(self._failures_kept, kept))

    def _failures_kept(self, kept: tuple[int, ...], outcome: Outcome) -> None:
        self._keeping = False
        if outcome is Outcome.DONE:
            self._world.checker.failures_kept(kept)
        if len(self._driver.failures) > len(kept) and not self._driver.machine.state.is_terminal:
            self.keep_failures()

    # --- attempts, and the end of the job

    def record_attempt(self, order: core.RecordAttempt) -> None:
        """An attempt that may not be recorded fails; its number may be used up all the same."""

        def effect() -> bool:
            self._world.ha.attempts = max(self._world.ha.attempts, order.attempt + 1)
            return True

        def answer(outcome: Outcome) -> None:
            recorded = outcome is Outcome.DONE
            event = core.AttemptRecorded(order.attempt) if recorded else core.AttemptNotRecorded(order.attempt, CAUSE)
            self._driver.tell(event)

        self.write("attempt", effect, answer, faults=0.03)

    def store_result(self, order: core.StoreResult) -> None:
        def effect() -> bool:
            ha = self._world.ha
            if self._driver.epoch >= ha.results_of and ha.result is None:
                self._world.checker.result_stored(self._driver)
                ha.result = JobResult(order.ended.status.value)
            return True

        def answer(outcome: Outcome) -> None:
            self._driver.tell(core.ResultStored() if outcome is Outcome.DONE else core.ResultNotStored())

        self.write("result", effect, answer, faults=0.5)  # there is only one in a schedule

    def clean_up(self, keeps_nothing: bool) -> None:
        """The job never runs again: what is not to be kept goes, then the job itself."""
        if not self._driver.leads:
            self._driver.lost_leadership()
            return
        files = self._world.files
        for name in sorted(files.directories):
            if name.startswith("chk-") and (keeps_nothing or METADATA not in files.directories[name]):
                files.delete_directory(name)
        if keeps_nothing:
            files.delete_shared(tuple(path for path in sorted(files.shared) if path.startswith("/shared/")))
        self._world.crash_point(self._driver, "before the job is removed")
        self._world.ha.job_is_stored = False
        self._world.ha.pointers.clear()
        self._world.ha.disposals.clear()
        assert self._world.ha.result is not None
        self._world.ha.result.dirty = False
