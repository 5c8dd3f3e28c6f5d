"""Claims: one owner of a place, found by everybody, whatever becomes of the writes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pytest

from ckpt_runtime.storage import claims
from ckpt_runtime.storage.claims import Claim, Claimant, ClaimedError
from ckpt_runtime.storage.errors import AmbiguousWriteError, CorruptFileError, NotFoundError
from ckpt_runtime.storage.filesystem import Location, resolve

FIRST = Claimant("1" * 32, "file:///ha/a", "file:///checkpoints/first")
SEEDS = 150
SECOND = Claimant("2" * 32, "file:///ha/b", "file:///checkpoints/second")


@pytest.fixture
def place(tmp_path: Path) -> Location:
    return resolve(str(tmp_path))


@pytest.mark.row("203.12")
def test_one_of_several_jobs_claims_a_place_and_the_others_are_refused(place: Location) -> None:
    claimants = [Claimant(f"{number:032x}", "file:///ha", f"file:///{number}") for number in range(6)]

    def acquire(claimant: Claimant) -> Claimant:
        try:
            claims.acquire(place, Claim(claimant, place.url))
        except ClaimedError as error:
            return error.claim.owner
        return claimant

    with ThreadPoolExecutor(len(claimants)) as pool:
        owners = set(pool.map(acquire, claimants))
    assert len(owners) == 1


def test_a_job_of_the_same_id_in_another_cluster_is_another_job(place: Location) -> None:
    claims.acquire(place, Claim(FIRST, place.url))
    namesake = Claimant(FIRST.job_id, SECOND.cluster, FIRST.directory)
    with pytest.raises(ClaimedError, match=f"claimed by job {FIRST.job_id} of file:///ha/a") as refused:
        claims.acquire(place, Claim(namesake, place.url))
    assert refused.value.url == place.child("claim").url
    claims.release(place)
    claims.acquire(place, Claim(namesake, place.url))


def test_job_renews_its_claim_and_keeps_its_files(place: Location) -> None:
    claims.acquire(place, Claim(FIRST, "file:///old", ("a", "b")))
    claims.acquire(place, Claim(FIRST, "file:///new", ("b", "c")))
    assert claims.read_claim(place) == Claim(FIRST, "file:///new", ("a", "b", "c"), number=1)


def test_a_job_from_a_snapshot_takes_over_the_shared_files_of_its_predecessor(place: Location) -> None:
    claims.acquire(place, Claim(FIRST, "file:///old", ("a",)))
    with pytest.raises(ClaimedError):
        claims.acquire(place, Claim(SECOND, "file:///new"), heir_of=["file:///checkpoints/other"])
    claims.acquire(place, Claim(SECOND, "file:///new"), heir_of=[FIRST.directory])
    assert claims.read_claim(place) == Claim(SECOND, "file:///new", ("a",), (FIRST,), 1)
    assert [path.name for path in Path(place.path).iterdir()] == ["claim"]


@pytest.mark.parametrize("arrived", [True, False])
def test_a_lost_answer_is_settled_by_reading(place: Location, monkeypatch: pytest.MonkeyPatch, arrived: bool) -> None:
    publish = claims.publish

    def loses_the_answer(file: Location, data: bytes) -> None:
        if arrived:
            publish(file, data)
        raise AmbiguousWriteError("no answer", file.url)

    monkeypatch.setattr(claims, "publish", loses_the_answer)
    if arrived:
        claims.acquire(place, Claim(FIRST, place.url))
        found = claims.read_claim(place)
        assert found is not None
        assert found.owner == FIRST
    else:
        with pytest.raises(AmbiguousWriteError):
            claims.acquire(place, Claim(FIRST, place.url))


def test_damaged_claim_does_not_count_as_free(place: Location) -> None:
    claims.acquire(place, Claim(FIRST, place.url))
    file = Path(claims.claim_file(place).path)
    file.write_bytes(file.read_bytes().replace(b"1111", b"1112"))
    with pytest.raises(CorruptFileError, match="claim is damaged"):
        claims.acquire(place, Claim(SECOND, place.url))


@pytest.mark.parametrize(
    ("path", "place"),
    [
        (f"/c/{'a' * 32}/chk-7", f"/c/{'a' * 32}"),
        ("/c/flights/chk-7", "/c/flights/chk-7"),
        (f"/c/{'a' * 32}/savepoint-1", f"/c/{'a' * 32}/savepoint-1"),
    ],
)
def test_checkpoints_where_a_job_wrote_them_are_claimed_together(path: str, place: str) -> None:
    assert claims.place_of_snapshot(resolve(path)).path == place


def test_claim_covers_shared_files_in_the_place_of_their_job_and_others_in_their_directory() -> None:
    assert claims.place_of_file(resolve(f"/c/{'a' * 32}/shared/chk-1-x")).path == f"/c/{'a' * 32}"
    assert claims.place_of_file(resolve("/s/savepoint-1/x")).path == "/s/savepoint-1"


def test_a_released_worker_has_a_successor_and_is_unknown(place: Location) -> None:
    claims.acquire(place, Claim(FIRST, "file:///old", ("a",)))
    claim = claims.read_claim(place)
    assert claim is not None
    claims.declare_owner_dead(place, claim)
    with pytest.raises(ClaimedError):
        claims.declare_owner_dead(place, claim)
    over = claims.read_claim(place)
    assert over is not None
    assert not over.owner.is_same_job(FIRST)
    with pytest.raises(ClaimedError):
        claims.acquire(place, Claim(FIRST, "file:///old"))
    claims.acquire(place, Claim(SECOND, "file:///new", ("b",)), is_dead=lambda owner: owner.is_over)
    found = claims.read_claim(place)
    assert found is not None
    assert (found.owner, found.files, found.earlier) == (SECOND, ("a", "b"), (over.owner,))


# --- of several that succeed a dead owner one does, wherever each of them stops


class Died(BaseException):
    """The process of a claimant ends here; nothing that it would do then is done."""


class Turns:
    """Threads take turns, a call of the storage at a time; any of them may die at any call."""

    def __init__(self, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self._random = Random(seed)
        self._waiting: dict[str, threading.Event] = {}
        self._changed = threading.Condition()
        self._running = 0
        self.dead: set[str] = set()
        for name in ("publish", "replace", "read_bytes", "delete_file", "list_names"):
            monkeypatch.setattr(claims, name, partial(self._call, getattr(claims, name)))

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        name = threading.current_thread().name
        if name in self.dead:
            raise Died
        self._wait(name)
        if self._random.random() < 0.08:
            self.dead.add(name)
            raise Died
        result = call(*arguments)
        if self._random.random() < 0.08:
            self.dead.add(name)
            raise Died
        return result

    def _wait(self, name: str) -> None:
        event = threading.Event()
        with self._changed:
            self._waiting[name] = event
            self._running -= 1
            self._changed.notify()
        assert event.wait(300)

    def run(self, calls: dict[str, Callable[[], None]]) -> None:
        threads = [threading.Thread(target=self._thread, args=(call,), name=name) for name, call in calls.items()]
        self._running = len(threads)
        for thread in threads:
            thread.start()
        with self._changed:
            while self._running or self._waiting:
                assert self._changed.wait_for(lambda: not self._running, 300)
                if self._waiting:
                    name = self._random.choice(sorted(self._waiting))
                    self._running += 1
                    self._waiting.pop(name).set()
        for thread in threads:
            thread.join()

    def _thread(self, call: Callable[[], None]) -> None:
        try:
            with suppress(Died):
                call()
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify()


def crowd(place: Location, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], int]:
    """Who has the place in the end and lives, and how many died. Jobs come in two waves, a dead owner before them."""
    claims.acquire(place, Claim(FIRST, "file:///old", ("a",)))
    with monkeypatch.context() as patched:
        turns = Turns(seed, patched)
        turns.dead.add(FIRST.job_id)
        winners: list[str] = []

        def claim(job_id: str) -> None:
            owner = Claimant(job_id, "session", f"file:///{job_id}")
            while True:
                try:
                    claims.acquire(place, Claim(owner, "file:///new"), is_dead=lambda other: other.job_id in turns.dead)
                except ClaimedError:
                    return
                except NotFoundError:
                    continue
                winners.append(job_id)
                return

        for wave in range(2):
            turns.run({job_id: partial(claim, job_id) for job_id in (f"{wave}{n}" for n in range(4))})
    return [job_id for job_id in winners if job_id not in turns.dead], len(turns.dead) - 1


@pytest.mark.row("203.12")
def test_two_living_jobs_never_claim_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    won = died = 0
    for seed in range(SEEDS):
        (directory := tmp_path / str(seed)).mkdir()
        place = resolve(str(directory))
        living, dead = crowd(place, seed, monkeypatch)
        assert len(living) <= 1, f"seed {seed}"
        if living:
            found = claims.read_claim(place)
            assert found is not None
            assert found.owner.job_id == living[0], f"seed {seed}"
            assert FIRST in found.earlier
        won, died = won + len(living), died + dead
    assert won > SEEDS / 2
    assert died > SEEDS


@pytest.mark.parametrize("bug", ["without a file", "without looking again", "a late one deletes the file"])
def test_the_crowd_finds_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str) -> None:
    if bug == "without a file":
        monkeypatch.setattr(claims, "_is_next", lambda *_: True)
    elif bug == "without looking again":
        read = claims.read_claim
        seen: dict[str, Claim | None] = {}
        monkeypatch.setattr(claims, "read_claim", lambda place: seen.setdefault(
            f"{place.url} {threading.current_thread().name}", read(place))
        )  # fmt: skip
    else:
        is_next = claims._is_next

        def deletes(place: Location, name: str, *rest: Any) -> bool:
            claims.delete_file(place.child(name))
            return is_next(place, name, *rest)

        monkeypatch.setattr(claims, "_is_next", deletes)
    for seed in range(20 * SEEDS):
        (directory := tmp_path / str(seed)).mkdir()
        living, _ = crowd(resolve(str(directory)), seed, monkeypatch)
        if len(living) > 1:
            return
    pytest.fail("no crowd has found it")
