"""Programs, snapshots and bodies that were made to take a driver's memory or time: named refusals, and jobs run on."""

from __future__ import annotations

import io
import re
import struct
import threading
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
import xxhash
import zstandard

from ckpt_runtime.client.packaging import pack_pipeline
from ckpt_runtime.storage import metadata
from ckpt_runtime.storage.publish import checksum_of
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import SequenceJob, fast, program_of
from tests.support.patience import patient

pytestmark = pytest.mark.attack

TIMEOUT_S = patient(60)
PATIENCE_S = patient(40.0)
"""How long an answer of the driver may take while it is attacked, on a machine that is busy with other tests."""
SPARE_MEMORY = 400 << 20
NOISE = """
import sys
def pipeline(spark):
    for _ in range(30_000):
        sys.stdout.write("x" * 100_000)
    for _ in range(3_000):
        sys.stderr.write("y" * 100_000)
    raise RuntimeError("printed 3 GB")
"""
GREED = "def pipeline(spark):\n    kept = []\n    while True:\n        kept.append(bytearray(64 << 20))\n"


@pytest.fixture(scope="module")
def session() -> Iterator[MiniCluster]:
    configuration = {"jobmanager.planning.memory": "512 mb", "jobmanager.planning.timeout": "60 s"}
    with MiniCluster(rest=True, configuration=configuration) as started:
        yield started


@pytest.fixture(scope="module")
def client(session: MiniCluster) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=session.rest_url, timeout=TIMEOUT_S) as connected:
        yield connected


@pytest.fixture(scope="module")
def job(session: MiniCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SequenceJob]:
    running = SequenceJob(session, tmp_path_factory.mktemp("attacked"))
    running.start(parallelism=1, rate=1000, configuration=fast())
    running.running()
    yield running
    running.end()


@contextmanager
def unharmed(session: MiniCluster, job: SequenceJob) -> Iterator[None]:
    """The driver (this process) answers all the time, takes little memory, and the job's checkpoints continue."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _memory("VmRSS")
    ended = threading.Event()
    longest = [0.0]

    def look() -> None:
        with httpx.Client(base_url=session.rest_url, timeout=TIMEOUT_S) as other:
            while not ended.wait(0.05):
                began = time.monotonic()
                assert other.get("/overview").status_code == 200
                longest[0] = max(longest[0], time.monotonic() - began)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        yield
    finally:
        ended.set()
        looking.join()
    assert longest[0] < PATIENCE_S
    assert _memory("VmHWM") - before < SPARE_MEMORY
    session.wait_for_checkpoints(job.job_id, 2)


def _memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) << 10


def upload(client: httpx.Client, name: str, content: bytes) -> httpx.Response:
    return client.post("/jars/upload", files={"jarfile": (name, content)})


def run(client: httpx.Client, uploaded: httpx.Response, **body: Any) -> httpx.Response:
    return client.post(f"/jars/{uploaded.json()['filename'].rsplit('/', 1)[-1]}/run", json=body)


@pytest.mark.parametrize(
    ("source", "message"), [(NOISE, "printed 3 GB"), (GREED, "MemoryError")], ids=["noise", "greed"]
)
def test_a_pipeline_that_prints_or_takes_much_is_refused(
    session: MiniCluster, client: httpx.Client, job: SequenceJob, source: str, message: str
) -> None:
    with unharmed(session, job):
        answer = run(client, upload(client, "greedy.py", source.encode()))
        assert answer.status_code == 400, answer.text
        assert message in answer.text


def test_a_small_zip_that_unpacks_to_much_source(session: MiniCluster, client: httpx.Client, job: SequenceJob) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("main.py", "x\n" * (32 << 20))
    assert len(buffer.getvalue()) < 70_000
    with unharmed(session, job):
        answer = upload(client, "bomb.zip", buffer.getvalue())
        assert answer.status_code == 400
        assert "bytes unpacked" in answer.text


def test_damaged_zips_are_bad_requests(client: httpx.Client) -> None:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("main.py", "def pipeline(spark): pass\n" * 9)
    for offset in range(0, len(buffer.getvalue()), 11):
        content = bytearray(buffer.getvalue())
        content[offset] ^= 0xFF
        assert upload(client, "damaged.zip", bytes(content)).status_code in (200, 400)


def forged(text: bytes) -> bytes:
    """Metadata with checksums that are right."""
    body = zstandard.ZstdCompressor().compress(text)
    fields = {
        "format": metadata.FORMAT,
        "version": 1,
        "length": len(body),
        "text_length": len(text),
        "checksum": checksum_of(body),
    }
    header = orjson.dumps({**fields, "header_checksum": checksum_of(orjson.dumps(fields))})
    return struct.pack("<II", 0x184D2A5C, len(header)) + header + body


def line(payload: bytes) -> bytes:
    return b"%s %s\n" % (xxhash.xxh3_64_hexdigest(payload).encode(), payload)


def lines(count: int, payload: bytes) -> bytes:
    text = line(b'["list","states",%d]' % count) + line(payload) * count
    return text + line(b'["end",%d,"%s"]' % (count + 1, xxhash.xxh3_128_hexdigest(text).encode()))


@pytest.mark.parametrize(
    ("count", "payload", "message"),
    [
        (700_000, b'["item",[]]', "values"),
        (510_000, b'["item",1]', "lines"),
        (1, b'["item",[' + b"[]," * 1_100_000 + b"[]]]", "values"),
        (3, b'["item",' + b"[" * 500_000 + b"]" * 500_000 + b"]", "nested too deep"),
        (1, b'["item",{' + b",".join(b'"%x":{"":{}}' % n for n in range(600_000)) + b"}]", "shape|bytes"),
        (1, b'["item","' + b"x" * (9 << 20) + b'"]', "bytes; at most"),
        (30_000, b'["item",{"vertex":"v","subtask":0,"state":{"operators":{},"bytes":0}}]', "has version None"),
    ],
    ids=["empties", "lines", "wide", "deep", "objects", "long", "doubles"],
)
def test_forged_metadata(
    session: MiniCluster,
    client: httpx.Client,
    job: SequenceJob,
    tmp_path: Path,
    count: int,
    payload: bytes,
    message: str,
) -> None:
    (tmp_path / "_metadata").write_bytes(forged(lines(count, payload)))
    uploaded = upload(client, *pack_pipeline(program_of("sequence")))
    with unharmed(session, job):
        answer = run(client, uploaded, entryClass="sequence:pipeline", savepointPath=str(tmp_path))
        assert answer.status_code == 400, answer.text
        assert re.search(message, answer.text), answer.text
        assert str(tmp_path) in answer.text


@pytest.mark.parametrize("piece", [b'\\"', b'"[', b'{"a":', b"\\", b'[{"":['])
def test_bodies_that_are_slow_to_scan(
    session: MiniCluster, client: httpx.Client, job: SequenceJob, piece: bytes
) -> None:
    with unharmed(session, job):
        for start in (b'{"a":"', b"[" * 33 + b'"'):
            body = start + piece * (200_000 // len(piece))
            assert client.post(f"/jobs/{job.job_id}/savepoints", content=body).status_code == 400
