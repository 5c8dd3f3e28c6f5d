"""``ckpt snapshot``: what it prints and with which code it ends, without any session."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from ckpt_runtime.cli.framework import ExitCode
from ckpt_runtime.cli.main import main
from ckpt_runtime.processes.process_mark import own_mark
from ckpt_runtime.storage.claims import Claim, Claimant, acquire, read_claim
from ckpt_runtime.storage.filesystem import resolve
from ckpt_runtime.storage.ha_store import HaStore
from ckpt_runtime.storage.job_store import StoredJob
from ckpt_runtime.storage.metadata import encode, read_metadata
from tests.support.golden import DIRECTORY

Capture = pytest.CaptureFixture[str]

pytestmark = pytest.mark.row("203.10")


@pytest.fixture(autouse=True)
def _no_session(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CKPT_REST_URL", raising=False)
    monkeypatch.setenv("CKPT_SESSION_FILE", str(tmp_path / "session.json"))


@pytest.fixture
def savepoint(tmp_path: Path) -> Path:
    return Path(shutil.copytree(DIRECTORY / "format-2" / "savepoint", tmp_path / "savepoints" / "savepoint-1"))


def damage(savepoint: Path) -> Path:
    file = next(path for path in savepoint.iterdir() if path.name != "_metadata")
    file.write_bytes(file.read_bytes()[:-1])
    return file


def printed(capsys: Capture) -> Any:
    return json.loads(capsys.readouterr().out)


def test_list_shows_snapshots_and_those_that_cannot_be_read(savepoint: Path, capsys: Capture) -> None:
    broken = savepoint.parent / "broken"
    broken.mkdir()
    (broken / "_metadata").write_bytes(b"garbage")
    assert main(["snapshot", "list", str(savepoint.parent), "--json"]) == 0
    found, unreadable = printed(capsys)
    assert found["location"] == savepoint.as_uri()
    assert (found["kind"], found["format"], found["state_backend"]) == ("SAVEPOINT", "NATIVE", "hashmap")
    assert unreadable["location"] == broken.as_uri()
    assert "_metadata" in unreadable["error"]
    assert main(["snapshot", "list", str(savepoint.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("SAVEPOINT")
    assert lines[1].endswith(savepoint.as_uri())
    assert lines[2].startswith("unreadable")


def test_list_of_a_directory_without_snapshots_is_empty(tmp_path: Path, capsys: Capture) -> None:
    assert main(["snapshot", "list", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "no snapshots\n"
    for command in ("list", "latest"):
        assert main(["snapshot", command, str(tmp_path / "missing")]) == ExitCode.NOT_FOUND
        assert "there is no directory" in capsys.readouterr().err


def test_show_describes_the_states_of_a_snapshot(savepoint: Path, capsys: Capture) -> None:
    assert main(["snapshot", "show", str(savepoint), "--json"]) == 0
    document = printed(capsys)
    assert document["written_by"] == "0.1.0"
    states = {(state["operator"], state["state"]): state for state in document["states"]}
    assert states["totals", "aggregates"]["keys"] == 20
    assert main(["snapshot", "show", str(savepoint), "--no-count"]) == 0
    text = capsys.readouterr().out
    assert "self-contained:  yes" in text
    assert "key.source: int64, user_key.start: int64, value.rows: int64" in text


def test_names_out_of_a_snapshot_do_nothing_to_a_terminal(savepoint: Path, capsys: Capture) -> None:
    text = json.dumps(read_metadata(str(savepoint)).document).replace('"totals"', json.dumps("to\x1b[2Jtals"))
    (savepoint / "_metadata").write_bytes(encode(json.loads(text)))
    assert main(["snapshot", "show", str(savepoint)]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_verify_names_the_file_and_state_of_a_damage(savepoint: Path, capsys: Capture) -> None:
    assert main(["snapshot", "verify", str(savepoint)]) == 0
    assert capsys.readouterr().out == f"{savepoint.as_uri()} is complete and intact.\n"
    file = damage(savepoint)
    assert main(["snapshot", "verify", str(savepoint), "--json"]) == 1
    document = printed(capsys)
    assert not document["intact"]
    (problem,) = document["problems"]
    assert file.name in problem["reason"]
    assert "operator" in problem["state"]


def test_verify_of_a_missing_or_damaged_snapshot_fails(savepoint: Path, capsys: Capture) -> None:
    assert main(["snapshot", "verify", str(savepoint / "missing")]) == 4
    assert main(["snapshot", "verify", "relative"]) == 2
    (savepoint / "_metadata").write_bytes(b"garbage")
    assert main(["snapshot", "verify", str(savepoint)]) == 1
    assert "_metadata" in capsys.readouterr().err


def test_copy_makes_a_whole_snapshot_or_none(savepoint: Path, tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "copy"
    assert main(["snapshot", "copy", str(savepoint), str(target), "--json"]) == 0
    assert printed(capsys)["location"] == target.as_uri()
    assert main(["snapshot", "verify", str(target)]) == 0
    assert main(["snapshot", "copy", str(savepoint), str(target)]) == 5
    file = damage(savepoint)
    assert main(["snapshot", "copy", str(savepoint), str(tmp_path / "other")]) == 1
    assert file.name in capsys.readouterr().err
    assert not (tmp_path / "other").exists()


def test_a_file_that_is_missing_is_damage(savepoint: Path, tmp_path: Path, capsys: Capture) -> None:
    file = damage(savepoint)
    file.unlink()
    target = str(tmp_path / "other")
    convert = ["convert", str(savepoint), target, "--format", "canonical"]
    for command in (["verify", str(savepoint)], ["show", str(savepoint)], ["copy", str(savepoint), target], convert):
        assert main(["snapshot", *command]) == ExitCode.FAILED, command
        reported = capsys.readouterr()
        assert file.name in reported.out + reported.err, command
    assert not (tmp_path / "other").exists()


def test_convert_writes_either_format_into_a_new_directory(savepoint: Path, capsys: Capture) -> None:
    canonical, native = savepoint.parent / "canonical", savepoint.parent / "native"
    assert main(["snapshot", "convert", str(savepoint), str(canonical), "--format", "canonical", "--json"]) == 0
    document = printed(capsys)
    assert document["location"] == canonical.as_uri()
    assert document["files"] == len(list(canonical.glob("*.parquet"))) > 0
    assert main(["snapshot", "convert", str(canonical), str(native), "--format", "NATIVE"]) == 0
    assert capsys.readouterr().out == f"{native.as_uri()}\n"
    assert main(["snapshot", "verify", str(native)]) == 0
    assert main(["snapshot", "convert", str(canonical), str(native), "--format", "native"]) == 5
    assert "native" in capsys.readouterr().err


def test_conversion_for_an_unknown_backend_or_without_another_form_is_refused(
    savepoint: Path, tmp_path: Path, capsys: Capture
) -> None:
    target = tmp_path / "target"
    order = ["snapshot", "convert", str(savepoint), str(target), "--format", "native", "--backend", "nosuch"]
    assert main(order) == ExitCode.USAGE
    assert "--backend: state.backend.type: 'nosuch' is not available, use " in capsys.readouterr().err
    assert not target.exists()
    target = savepoint.parent / "canonical"
    order = ["snapshot", "convert", str(savepoint), str(target), "--format", "canonical", "--backend", "rocksdb"]
    assert main(order) == ExitCode.USAGE
    assert "--backend is for --format native" in capsys.readouterr().err
    assert not target.exists()
    unaligned, target = DIRECTORY / "format-2" / "unaligned", tmp_path / "target"
    assert main(["snapshot", "convert", str(unaligned), str(target), "--format", "canonical"]) == 2
    assert "take a savepoint" in capsys.readouterr().err
    assert not target.exists()


def claimed(savepoint: Path, cluster: str, process: str | None = None) -> str:
    owner = Claimant("1" * 32, cluster, savepoint.parent.as_uri(), process)
    acquire(resolve(str(savepoint)), Claim(owner, savepoint.as_uri()))
    return owner.job_id


def owner_of(savepoint: Path) -> Claimant:
    claim = read_claim(resolve(str(savepoint)))
    assert claim is not None
    return claim.owner


@pytest.mark.row("203.12")
def test_release_of_a_claim_needs_the_owner_declared_dead_if_its_session_may_live(
    savepoint: Path, capsys: Capture
) -> None:
    assert main(["snapshot", "release", str(savepoint)]) == ExitCode.NOT_FOUND
    assert "no job has claimed" in capsys.readouterr().err
    job = claimed(savepoint, "session a", "another-boot/pid:[1]/7/7")
    for said in ([], ["--owner-is-dead", "2" * 32]):
        assert main(["snapshot", "release", str(savepoint), *said]) == ExitCode.CONFLICT
        assert f"--owner-is-dead {job}" in capsys.readouterr().err
    assert not owner_of(savepoint).is_over
    assert main(["snapshot", "release", str(savepoint), "--owner-is-dead", job, "--json"]) == 0
    assert printed(capsys) == {"place": savepoint.as_uri(), "job": job, "cluster": "session a"}
    assert owner_of(savepoint).is_over
    assert main(["snapshot", "release", str(savepoint)]) == 0


@pytest.mark.row("203.12")
def test_release_while_the_owner_lives(savepoint: Path, capsys: Capture) -> None:
    job = claimed(savepoint, "session a", own_mark())
    assert main(["snapshot", "release", str(savepoint), "--owner-is-dead", job]) == ExitCode.CONFLICT
    assert "its session is a process of this machine" in capsys.readouterr().err
    assert not owner_of(savepoint).is_over


@pytest.mark.row("203.12")
def test_release_of_what_a_stored_job_has_claimed(savepoint: Path, tmp_path: Path, capsys: Capture) -> None:
    store = HaStore(str(tmp_path / "ha"))
    job = claimed(savepoint, store.root.url)
    store.jobs.put(StoredJob(job, {}, {}), b"archive")
    assert main(["snapshot", "release", str(savepoint), "--owner-is-dead", job]) == ExitCode.CONFLICT
    assert "whose leader runs it" in capsys.readouterr().err
    store.jobs.remove(job)
    assert main(["snapshot", "release", str(savepoint), "--owner-is-dead", job]) == 0
    assert owner_of(savepoint).is_over


HELD_COPY = """
import signal, sys, threading
from ckpt_runtime.cli.main import main
from ckpt_runtime.snapshots import copying

read, set_handler, interrupted = copying.read_range, signal.signal, threading.Event()

def noted(number, handler):
    def handle(*arguments):
        interrupted.set()
        handler(*arguments)
    return set_handler(number, handle if callable(handler) else handler)

def held(*arguments):
    # No range is read before the interruption: otherwise the copy could be complete before.
    sys.stdout.write("copying\\n")
    sys.stdout.flush()
    interrupted.wait()
    return read(*arguments)

signal.signal = noted
copying.read_range = held
sys.exit(main(["snapshot", "copy", *sys.argv[1:]]))
"""


@pytest.mark.row("203.4")
def test_a_copy_that_is_terminated_leaves_no_files(savepoint: Path, tmp_path: Path) -> None:
    order = [sys.executable, "-c", HELD_COPY, str(savepoint), str(tmp_path / "new" / "copy")]
    copy = subprocess.Popen(order, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert copy.stdout is not None
        assert copy.stdout.readline().startswith("copying")
        assert (tmp_path / "new" / "copy").exists()
        copy.terminate()
        _, reported = copy.communicate(timeout=60)
    finally:
        copy.kill()
        copy.communicate()
    assert (copy.returncode, reported) == (ExitCode.INTERRUPTED, "ckpt: interrupted\n")
    assert not (tmp_path / "new").exists()
