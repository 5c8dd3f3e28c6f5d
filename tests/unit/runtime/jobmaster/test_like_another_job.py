"""``likeJob``: what a request takes over from another job, and what it does not."""

from __future__ import annotations

from dataclasses import replace

from ckpt_runtime.configuration.configuration import ChangeNote, Configuration, OwnConfiguration
from ckpt_runtime.jobmaster.gateway_values import RunRequest
from ckpt_runtime.jobmaster.request_checks import completed_like, like

OTHER = RunRequest(
    "old", "m:pipeline", ("--x",), 3, {"asked": "1", "changed": "1", "execution.state-recovery.path": "/p"}
)
NOW = OwnConfiguration(
    Configuration(
        {"asked": "1", "changed": "2", "added": "3", "by-the-program": "4", "execution.state-recovery.path": "/p"}
    ),
    version=3,
    notes=(ChangeNote(2, 0, "me", ("changed",)), ChangeNote(3, 0, "me", ("added",))),
)
REQUEST = RunRequest("old", job_id="a" * 32, like_job="b" * 32, savepoint_path="/s")


def test_same_program_has_all_that_the_job_has_now_and_another_one_its_own_options() -> None:
    found = like(REQUEST, OTHER, NOW)
    assert (found.entry_point, found.arguments, found.parallelism) == ("m:pipeline", ("--x",), 3)
    assert found.configuration == {"asked": "1", "changed": "2", "added": "3", "by-the-program": "4"}
    assert (found.savepoint_path, found.job_id) == ("/s", "a" * 32)
    found = like(replace(REQUEST, pipeline_id="new", configuration={"asked": "7"}, parallelism=5), OTHER, NOW)
    assert found.configuration == {"asked": "7", "changed": "2", "added": "3"}
    assert found.parallelism == 5
    found = like(replace(REQUEST, pipeline_id="new"), OTHER, replace(NOW, version=9))
    assert "by-the-program" in found.configuration


def test_a_repeated_request_is_the_same_request_after_any_end_of_the_other_job() -> None:
    first = like(REQUEST, OTHER, NOW)
    assert completed_like(REQUEST, first) == first
    assert completed_like(replace(REQUEST, arguments=("--y",)), first) != first
    assert completed_like(replace(REQUEST, like_job=None), first) != first


OLDER, PRESENT = "state.backend", "state.backend.type"


def test_older_spellings_of_options_are_the_same_options() -> None:
    """What was asked for under one stays with another program, and what is asked for now wins under either."""
    other = replace(OTHER, configuration={OLDER: "rocksdb"})
    now = OwnConfiguration(Configuration({OLDER: "rocksdb", "by-the-program": "4"}))
    request = replace(REQUEST, pipeline_id="new")
    assert like(request, other, now).configuration == {PRESENT: "rocksdb"}
    for spelling in (OLDER, PRESENT, f" {OLDER} "):
        found = like(replace(request, configuration={spelling: "hashmap"}), other, now)
        assert Configuration(found.configuration).to_dict() == {PRESENT: "hashmap"}
        assert completed_like(replace(request, configuration={spelling: "hashmap"}), found) == found
