"""Claims: one owner of a place, found by everybody, whatever becomes of the writes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ckpt_runtime.storage import claims
from ckpt_runtime.storage.claims import Claim, Claimant, ClaimedError
from ckpt_runtime.storage.errors import AmbiguousWriteError, CorruptFileError
from ckpt_runtime.storage.filesystem import Location, resolve

FIRST = Claimant("1" * 32, "file:///ha/a", "file:///checkpoints/first")
SECOND = Claimant("2" * 32, "file:///ha/b", "file:///checkpoints/second")


@pytest.fixture
def place(tmp_path: Path) -> Location:
    return resolve(str(tmp_path))


@pytest.mark.row("203.12")
def test_one_of_several_jobs_gets_a_place_and_the_others_hear_of_it(place: Location) -> None:
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


def test_its_own_job_renews_a_claim_and_forgets_no_file(place: Location) -> None:
    claims.acquire(place, Claim(FIRST, "file:///old", ("a", "b")))
    claims.acquire(place, Claim(FIRST, "file:///new", ("b", "c")))
    assert claims.read_claim(place) == Claim(FIRST, "file:///new", ("a", "b", "c"))


def test_an_heir_takes_over_what_the_job_had_that_it_goes_on_from(place: Location) -> None:
    claims.acquire(place, Claim(FIRST, "file:///old", ("a",)))
    with pytest.raises(ClaimedError):
        claims.acquire(place, Claim(SECOND, "file:///new"), heir_of=["file:///checkpoints/somebody"])
    claims.acquire(place, Claim(SECOND, "file:///new"), heir_of=[FIRST.directory])
    assert claims.read_claim(place) == Claim(SECOND, "file:///new", ("a",), (FIRST,))


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
        assert claims.read_claim(place) == Claim(FIRST, place.url)
    else:
        with pytest.raises(AmbiguousWriteError):
            claims.acquire(place, Claim(FIRST, place.url))


def test_a_damaged_claim_is_no_free_place(place: Location) -> None:
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


def test_shared_files_lie_in_the_place_of_their_job_and_others_in_their_directory() -> None:
    assert claims.place_of_file(resolve(f"/c/{'a' * 32}/shared/chk-1-x")).path == f"/c/{'a' * 32}"
    assert claims.place_of_file(resolve("/s/savepoint-1/x")).path == "/s/savepoint-1"
