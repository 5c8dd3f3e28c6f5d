"""Uploaded programs: how they are stored, and how long they are held."""

from __future__ import annotations

import io
import zipfile
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.jobmaster import program_store
from ckpt_runtime.jobmaster.gateway_values import InvalidRequest, NotReady, PipelineInUse, PipelineNotFound
from ckpt_runtime.jobmaster.program_store import ProgramHolds, ProgramRefusedError, ProgramStore, modules_of
from ckpt_runtime.storage.ha_store import HaStore

pytestmark = pytest.mark.usefixtures("process_template")
PIPELINE = b"def pipeline(spark):\n    pass\n"


@pytest.fixture
def store(tmp_path: Path) -> ProgramStore:
    return ProgramStore(tmp_path / "uploads")


def zipped(files: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def test_the_same_content_again_is_the_same_program(store: ProgramStore, tmp_path: Path) -> None:
    first, second = store.add("job.py", PIPELINE, 5), store.add("job.py", PIPELINE, 6)
    assert first.id == second.id
    assert store.list() == (second,)
    assert len(list((tmp_path / "uploads").iterdir())) == 1
    assert store.add("job.py", PIPELINE + b"\n", 7).id != first.id


def test_same_content_is_stored_again_only_if_its_file_is_damaged_or_missing(store: ProgramStore) -> None:
    stored = store.add("job.py", PIPELINE, 5)
    archive = store.get(stored.id).archive
    content, file = archive.read_bytes(), archive.stat().st_ino
    again = store.add("job.py", PIPELINE, 6)
    assert archive.stat().st_ino == file
    assert again == replace(stored, uploaded_at_ms=6)
    archive.write_bytes(content[:-1])
    assert store.add("job.py", PIPELINE, 7) == replace(stored, uploaded_at_ms=7)
    assert archive.read_bytes() == content
    archive.unlink()
    store.add("job.py", PIPELINE, 8)
    assert archive.read_bytes() == content


def test_entry_point_is_the_only_one_or_that_of_the_module_with_the_name_of_the_archive(store: ProgramStore) -> None:
    content = zipped({"main.py": PIPELINE, "helper.py": b"x = 1", "pkg/other.py": PIPELINE, "data.txt": b""})
    program = store.get(store.add("job.zip", content, 0).id)
    assert program.default_entry == "main:pipeline"
    stored = store.add("job.zip", zipped({"a.py": PIPELINE, "b.py": PIPELINE}), 0)
    assert stored.entry_points == ("a:pipeline", "b:pipeline")
    assert store.get(stored.id).default_entry is None
    stored = store.add("b.zip", zipped({"a.py": PIPELINE, "b.py": PIPELINE}), 0)
    assert store.get(stored.id).default_entry == "b:pipeline"
    stored = store.add("job.py", b"def other(spark): ...", 0)
    assert stored.entry_points == ()
    assert store.get(stored.id).default_entry is None


def test_inspection_does_not_run_code_of_the_upload(store: ProgramStore, tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    store.add("job.py", f"open({str(mark)!r}, 'w')\ndef pipeline(s): ...".encode(), 0)
    assert not mark.exists()


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("../../etc/job.py", "job.py"),
        ("C:\\temp\\job.py", "job.py"),
        ("/abs/job.py", "job.py"),
        ("my job.zip", "my_job.zip"),
        ("j\0ö\n.zip", "j_.zip"),
        (".zip", ".zip"),
    ],
)
def test_file_names_are_for_display_and_lead_nowhere(
    store: ProgramStore, tmp_path: Path, filename: str, name: str
) -> None:
    content = PIPELINE if name.endswith(".py") else zipped({"main.py": PIPELINE})
    stored = store.add(filename, content, 0)
    assert stored.name == name
    assert store.get(stored.id).archive.parent == tmp_path / "uploads"
    assert store.get(stored.id).archive.is_file()


@pytest.mark.parametrize(
    ("filename", "content", "problem"),
    [
        ("job.jar", b"", r"Python file \(\.py\) or a zip archive"),
        ("", b"", "named like a module|Python file|valid Python"),
        ("..", b"", "Python file"),
        ("my-job.py", PIPELINE, "named like a module"),
        (".py", PIPELINE, "named like a module"),
        ("job.py", b"def pipeline(:", "not valid Python"),
        ("job.py", b"\0", "not valid Python"),
        ("job.py", b"\xff\xfe\xfa", "not valid Python"),
        ("job.py", b"x = " + b"-" * 200_000 + b"1", "not valid Python"),
        ("job.py", b"x = " + b"(" * 5_000, "not valid Python"),
        ("job.zip", b"no zip at all", "not a readable zip"),
        ("job.zip", b"", "not a readable zip"),
        ("job.zip", zipped({"pkg/m.py": PIPELINE}), "at its top level"),
        ("job.zip", zipped({}), "at its top level"),
        ("x" * 300 + ".zip", zipped({"m.py": PIPELINE}), "at most 200 characters"),
    ],
)
def test_upload_that_cannot_be_a_pipeline_is_refused_and_not_kept(
    store: ProgramStore, tmp_path: Path, filename: str, content: bytes, problem: str
) -> None:
    if filename == "":
        content = b"def pipeline(:"
    with pytest.raises(InvalidRequest, match=problem) as refused:
        store.add(filename, content, 0)
    assert refused.value.field == "jarfile"
    assert store.list() == ()
    assert not (tmp_path / "uploads").exists() or not list((tmp_path / "uploads").iterdir())


def test_damaged_and_encrypted_members_are_named(store: ProgramStore) -> None:
    content = bytearray(zipped({"main.py": PIPELINE * 10}, zipfile.ZIP_STORED))
    content[content.index(b"pipeline")] ^= 0xFF
    with pytest.raises(InvalidRequest, match=r"'main\.py' cannot be read"):
        store.add("job.zip", bytes(content), 0)
    content = bytearray(zipped({"main.py": PIPELINE}))
    for signature, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        content[content.index(signature) + flags] |= 1
    with pytest.raises(InvalidRequest, match=r"'main\.py' cannot be read.*encrypted"):
        store.add("job.zip", bytes(content), 0)


@pytest.mark.parametrize("bomb", ["main.py", "data/zeros"])
def test_a_small_zip_that_unpacks_to_much_is_refused_with_the_limit(store: ProgramStore, bomb: str) -> None:
    content = zipped({"main.py": PIPELINE, bomb: b" " * (64 << 20)})
    assert len(content) < 70_000
    limit = program_store.FREE_UNPACKED_BYTES + program_store.MAX_RATIO * len(content)
    with pytest.raises(InvalidRequest, match=f"unpack to 671088.*at most {limit} bytes unpacked"):
        store.add("job.zip", content, 0)
    assert store.list() == ()


def test_module_larger_than_the_parsed_limit_is_refused(store: ProgramStore) -> None:
    source = PIPELINE + b"#" * program_store.MAX_SOURCE_BYTES
    with pytest.raises(InvalidRequest, match="at most 1048576"):
        store.add("job.py", source, 0)
    with pytest.raises(InvalidRequest, match=r"'main\.py' has \d+ bytes.*at most 1048576"):
        store.add("job.zip", zipped({"main.py": source}), 0)


def test_the_number_of_files_is_limited(tmp_path: Path) -> None:
    archive = tmp_path / "x.zip"
    archive.write_bytes(zipped({"main.py": PIPELINE, **{f"data/{n}": b"" for n in range(10_000)}}))
    with pytest.raises(ProgramRefusedError, match="10001 files; at most 10000 files"):
        modules_of(archive)
    archive.write_bytes(zipped({f"m{n}.py": b"" for n in range(201)}))
    with pytest.raises(ProgramRefusedError, match="at most 200 Python modules"):
        modules_of(archive)


def test_source_that_takes_too_much_memory_to_parse_ends_its_own_process(
    store: ProgramStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program_store, "LIMITS", replace(program_store.LIMITS, memory_bytes=16 << 20))
    with pytest.raises(InvalidRequest, match="MemoryError|within the limits"):
        store.add("job.py", PIPELINE + b"x\n" * 500_000, 0)


async def chunks(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part


def test_an_upload_comes_in_pieces(store: ProgramStore) -> None:
    import asyncio

    stored = asyncio.run(store.store("job.py", chunks(PIPELINE[:7], b"", PIPELINE[7:]), 1))
    assert stored == store.add("job.py", PIPELINE, 1)


def test_deleting_forgets_file_and_entry(store: ProgramStore) -> None:
    stored = store.add("job.py", PIPELINE, 0)
    archive = store.get(stored.id).archive
    store.delete(stored.id)
    assert not archive.exists()
    for call in (store.get, store.delete):
        with pytest.raises(PipelineNotFound, match=stored.id):
            call(stored.id)


@pytest.mark.parametrize("program_id", ["", "../x", "nothing"])
def test_an_unknown_id_is_not_found(store: ProgramStore, program_id: str) -> None:
    with pytest.raises(PipelineNotFound):
        store.get(program_id)


SOURCE = b"def pipeline(spark):\n    pass\n"


class Driver:
    """What one driver has of programs."""

    def __init__(self, directory: Path, number: int) -> None:
        self.programs = ProgramStore(directory / f"uploads-{number}")
        self.running: dict[str, bytes] = {}
        self.holds = ProgramHolds(self.programs, self.running.get)
        self.store = HaStore(str(directory / "ha"), epoch=number).programs
        self.pool = ThreadPoolExecutor(2)

    async def hold(self, program: str, owner: str, now: int = 7) -> None:
        await self.holds.hold(program, owner, now, self.pool, self.pool)

    async def release(self, program: str, owner: str) -> None:
        await self.holds.release(program, owner, self.pool)


@asynccontextmanager
async def opened(directory: Path) -> AsyncIterator[tuple[Driver, Driver]]:
    first, second = Driver(directory, 1), Driver(directory, 2)
    yield first, second
    first.pool.shutdown()
    second.pool.shutdown()


def archives(directory: Path) -> list[str]:
    return [path.name for path in directory.glob("ha/default/programs/archive-*")]


async def test_a_held_program_is_not_deleted_until_the_last_owner_releases_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (driver, _):
        program = driver.programs.add("job.py", SOURCE, 1).id
        for owner in ("one", "two", "one"):
            await driver.hold(program, owner)
        await driver.release(program, "one")
        await driver.release(program, "unknown")
        with pytest.raises(PipelineInUse, match=f"Pipeline {program} is held by two; release it first"):
            driver.holds.check_unheld(program)
        await driver.release(program, "two")
        driver.holds.check_unheld(program)
        with pytest.raises(PipelineNotFound):
            await driver.hold("0" * 32 + "_job.py", "one")


@pytest.mark.row("air.4")
async def test_next_driver_has_the_held_programs(tmp_path: Path) -> None:
    async with opened(tmp_path) as (first, second):
        await first.holds.take_over(first.store)
        kept, released = (first.programs.add("job.py", SOURCE + end, 1) for end in (b"", b"\n"))
        for program in (kept, released):
            await first.hold(program.id, "me", now=5)
        await first.release(released.id, "me")
        await second.holds.take_over(second.store)
        assert second.programs.list() == (kept,)
        assert second.holds.of(kept.id) == {"me": 5}
        with pytest.raises(NotReady, match="belongs to the leader of epoch 2"):
            await first.hold(released.id, "late")
        await second.release(kept.id, "me")
        second.store.adopt()  # deletes what the former leader wrote too late
        assert archives(tmp_path) == []


async def test_deleted_program_is_restored_from_a_job_that_runs_it(tmp_path: Path) -> None:
    async with opened(tmp_path) as (driver, _):
        program = driver.programs.add("job.py", SOURCE, 1).id
        driver.running[program] = driver.programs.get(program).archive.read_bytes()
        driver.programs.delete(program)
        await driver.hold(program, "me")
        assert driver.programs.get(program).archive.read_bytes() == driver.running[program]
        driver.running["0" * 32 + "_job.py"] = driver.running[program]
        with pytest.raises(InvalidRequest, match="digest"):
            await driver.hold("0" * 32 + "_job.py", "me")


async def test_an_archive_that_cannot_be_read_stops_no_takeover(tmp_path: Path) -> None:
    async with opened(tmp_path) as (first, second):
        await first.holds.take_over(first.store)
        program = first.programs.add("job.py", SOURCE, 1).id
        await first.hold(program, "me")
        (tmp_path / "ha/default/programs" / archives(tmp_path)[0]).write_bytes(b"damaged")
        await second.holds.take_over(second.store)
        assert second.holds.of(program) == {"me": 7}
        assert second.programs.list() == ()
