"""High availability in the simulation: what survives every driver, and the record through which one driver changes it.

The rules are those of the engine's fenced documents: the fence is asked before and behind each write, a write is a
compare-and-set, and what a later leader has adopted no earlier one can change. A driver may be paused or die between
the fence and the write.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from ckpt_runtime.checkpoint.completed_checkpoint import CompletedCheckpoint
from ckpt_runtime.checkpoint.configuration import OverridesChange
from ckpt_runtime.checkpoint.retention import RetainedCheckpoint
from ckpt_runtime.configuration.configuration import OwnConfiguration
from ckpt_runtime.graph.job_graph import JobGraph
from ckpt_runtime.jobmaster.job_record import JobRecord, with_plan
from ckpt_runtime.storage.checkpoint_storage import SnapshotDisposal
from ckpt_runtime.storage.errors import AmbiguousWriteError, NotFoundError, NotLeaderError, StorageError
from ckpt_runtime.storage.job_store import StoredJob
from tests.simulation.protocols.event_loop import DriverCrash
from tests.simulation.protocols.files import DIRECTORY

if TYPE_CHECKING:
    from tests.simulation.protocols.driver import Driver


@dataclass(slots=True)
class JobResult:
    """How the job ended; ``dirty`` until everything else of it is cleaned up."""

    status: str
    dirty: bool = True


@dataclass(slots=True)
class HaStore:
    """``epoch`` is the fence. ``adopted`` has the epoch that closed each document, ``revisions`` its writes.

    ``signs`` are those of life in this epoch, the last one at ``last_sign``; ``released`` by the driver that has led in
    it. ``counter`` and ``attempts`` are the first numbers that nothing has used up. ``graph`` is what the job runs, and
    ``document`` has its configuration.
    """

    graph: JobGraph
    document: StoredJob
    overrides: str | None = None
    epoch: int = 0
    signs: int = 0
    last_sign: int = 0
    released: bool = False
    counter: int = 1
    attempts: int = 0
    pointers: dict[int, RetainedCheckpoint] = field(default_factory=dict)
    disposals: dict[int, SnapshotDisposal] = field(default_factory=dict)
    savepoints: dict[int, str] = field(default_factory=dict)
    result: JobResult | None = None
    failures: tuple[Mapping[str, Any], ...] = ()
    job_is_stored: bool = True
    adopted: Counter[str] = field(default_factory=Counter)
    revisions: Counter[str] = field(default_factory=Counter)

    def adopt(self, document: str, epoch: int) -> None:
        """From now on no earlier driver can change it, and no write that is on its way takes effect."""
        self.adopted[document] = epoch
        self.revisions[document] += 1


class HaRecord(JobRecord):
    """The record of one driver."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self._driver = driver
        self._world = driver.world
        self._ha = driver.world.ha

    def check(self) -> None:
        fence = self._driver.fence()
        if fence is None:
            raise StorageError("simulated: the lease has run out", "")
        if not fence:
            raise NotLeaderError("simulated: another driver leads", "")

    def _write(self, what: str, document: str, effect: Callable[[], object], faults: float = 0.06) -> None:
        """One write, which is fenced twice."""
        self.check()
        revision = self._ha.revisions[document]
        land = partial(self._land, document, revision, effect)
        try:
            self._world.step(self._driver, f"writing {what}")
        except DriverCrash:
            if self._world.choices.chance("request is on its way", 0.5):
                land()
            raise
        choices, how = self._world.choices, "done"
        if choices.fault(f"{what} goes wrong", faults):
            how = choices.pick("how a write goes wrong", ("failed", "failed", "unknown", "lost", "late"))
        if how == "failed":
            raise StorageError(f"simulated: {what} was not written", "")
        if how == "late":
            self._world.loop.at(self._world.loop.now + choices.delay("late write", 20, 200), None, land)
        elif how != "lost":
            self._check_open(document)
            # All but the plan are fetched and modified again when another write came in between.
            if not land() and (document == "plan" or not self._land(document, self._ha.revisions[document], effect)):
                raise StorageError(f"simulated: {what} was changed meanwhile", "")
        if how != "done" and not self.believes(what):
            raise AmbiguousWriteError(f"simulated: no answer to the write of {what}", "")
        self._check_behind()

    @staticmethod
    def believes(what: str) -> bool:
        """Whether a write without an answer is taken for done."""
        return False

    def _check_open(self, document: str) -> None:
        if self._ha.adopted[document] > self._driver.epoch:
            raise NotLeaderError(f"simulated: a later leader has adopted {document}", "")
        if not self._ha.job_is_stored and document != "result":
            raise NotFoundError("simulated: the job is gone", "")

    def _check_behind(self) -> None:
        try:
            self.check()
        except NotLeaderError:
            raise
        except StorageError as error:
            raise AmbiguousWriteError(str(error), "") from error

    def _land(self, document: str, revision: int, effect: Callable[[], object]) -> bool:
        """Whether the write takes effect: not when it lost the compare-and-set."""
        ha = self._ha
        stored = ha.job_is_stored or document == "result"
        if ha.revisions[document] != revision or ha.adopted[document] > self._driver.epoch or not stored:
            return False
        ha.revisions[document] += 1
        effect()
        return True

    # --- ids, pointers, deletions

    def reserve(self, checkpoint_id: int) -> None:
        def effect() -> None:
            self._ha.counter = max(self._ha.counter, checkpoint_id + 1)

        self._write("checkpoint id", "counters", effect, faults=0.01)

    def begin_attempt(self, attempt: int) -> None:
        def effect() -> None:
            self._ha.attempts = max(self._ha.attempts, attempt + 1)

        self._write("attempt", "counters", effect, faults=0.03)

    def add(self, checkpoint: CompletedCheckpoint, owned: bool) -> None:
        entry = RetainedCheckpoint(checkpoint, owned)

        def effect() -> None:
            if checkpoint.id not in self._ha.pointers:
                self._world.checker.pointer_added(self._driver, checkpoint)
            self._ha.pointers[checkpoint.id] = entry

        self._write("pointer", "pointers", effect)
        self._confirmed(checkpoint.id)

    def contains(self, checkpoint_id: int) -> bool:
        found = checkpoint_id in self._ha.pointers
        self._world.step(self._driver, "reading pointers")
        self._check_behind()
        if found:
            self._confirmed(checkpoint_id)
        return found

    def _confirmed(self, checkpoint_id: int) -> None:
        """The leader knows that the pointer is there: what it does next is right, even if it is paused before."""
        if self._driver.leads:
            self._driver.checker.confirmed.add(checkpoint_id)

    def remove(self, checkpoint_id: int, disposal: SnapshotDisposal | None = None) -> None:
        def effect() -> None:
            place = self._driver.checker.removing.get(checkpoint_id) or DIRECTORY
            if self._ha.pointers.pop(checkpoint_id, None) is not None and not place.startswith(DIRECTORY):
                self._world.checker.released.add(place)
            if disposal is not None:
                self._ha.disposals[checkpoint_id] = disposal

        self._write("removal", "pointers", effect)

    def settle(self, checkpoint_id: int) -> None:
        self._write("disposal", "pointers", lambda: self._ha.disposals.pop(checkpoint_id, None))

    def expect_savepoint(self, checkpoint_id: int, directory: str) -> None:
        self._write("savepoint", "pointers", lambda: self._ha.savepoints.update({checkpoint_id: directory}), 0.02)

    def settle_savepoint(self, checkpoint_id: int) -> None:
        self._write("savepoint", "pointers", lambda: self._ha.savepoints.pop(checkpoint_id, None))

    # --- the stored plan

    def change_overrides(self, change: OverridesChange) -> str | None:
        driver, clients, before = self._driver, self._world.checker.clients, self._ha.overrides
        document = change(before)
        clients.stores(driver.storing, document)

        def effect() -> None:
            clients.written(document)
            self._ha.overrides = document

        if document != before:
            self._write("overrides", "plan", effect, 0.6 if driver.tries_again else 0.06)
        else:
            self._check_open("plan")
            self._check_behind()
        return document

    def settle_overrides(self) -> str | None:
        document = self._ha.overrides
        self._write("overrides", "plan", lambda: None, 0.3)
        return document

    def store_plan(self, graph: JobGraph, own: OwnConfiguration) -> None:
        if (self._ha.graph, self._ha.document.version) == (graph, own.version) and self._ha.job_is_stored:
            self._check_open("plan")
            self._check_behind()
            return
        driver, ha = self._driver, self._ha

        def effect() -> None:
            driver.changes.stores(graph)
            self._world.options.stored(ha.document, own)
            ha.graph = graph
            ha.document = with_plan(ha.document, graph, own)

        self._write("graph", "plan", effect, 0.6 if driver.tries_again else 0.1)

    def settle_plan(self, graph: JobGraph, own: OwnConfiguration) -> bool:
        stored = (self._ha.graph, self._ha.document.version)
        self._write("graph", "plan", lambda: None, 0.3)
        return stored == (graph, own.version)

    # --- failures, and the end

    def keep_failures(self, failures: Sequence[Mapping[str, Any]]) -> None:
        kept = tuple(failures)

        def effect() -> None:
            self._ha.failures = kept

        self._write("failures", "failures", effect)
        self._world.checker.failures_kept(kept)

    def end(self, result: Mapping[str, Any]) -> None:
        def effect() -> None:
            if self._ha.result is None:
                self._world.checker.result_stored(self._driver)
                self._ha.result = JobResult(self._driver.ends_as)

        self._write("result", "result", effect, faults=0.5)  # there is only one in a schedule

    def forget(self) -> None:
        self.check()
        ha = self._ha
        self._world.step(self._driver, "forgetting the job")
        ha.job_is_stored = False
        ha.pointers.clear()
        ha.disposals.clear()
        ha.savepoints.clear()
        self._world.step(self._driver, "the job is removed")
        assert ha.result is not None
        ha.result.dirty = False
