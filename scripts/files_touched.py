"""Counts the package's files that one operation executes: hand-overs that make the next change expensive.

Run as ``python scripts/files_touched.py [patch | savepoint | checkpoint ...]``. A whole session runs a small job:
driver and REST server in this process, slot agents and workers in theirs. This process notes when which function began
(:func:`sys.setprofile`). A file counts when one of its functions ran during the operation and in no moment when the
session did without it: what heartbeats and rows execute anyway is not counted.

- ``patch``: a PATCH of the checkpoint configuration, from the request's arrival to its answer
- ``savepoint``: ``TakeSavepointOperator`` of the Airflow provider; the files of the provider and of the client
- ``checkpoint``: a periodic checkpoint, from its trigger to the end of its clean-up; the files of the driver only,
  because the code that workers run depends on the rows that arrive

The first operation of its kind imports and compiles; it is left out, and the second one is counted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
import traceback
import urllib.request
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = (f"{ROOT}/runtime/ckpt_runtime/", f"{ROOT}/runtime/pyspark_ckpt/", f"{ROOT}/airflow_provider_ckpt/")
LIMITS = {"patch": 14, "savepoint": 12, "checkpoint": 25}
_TESTING = "runtime/ckpt_runtime/testing/"
_EVERY_NS = 20_000_000
"""A function that runs again within this time is not noted again."""
_QUIET_S = 3.0
_CHECKPOINTS = 5
"""Completed checkpoints to wait for: the third one is counted, and the time between later ones is quiet."""


def trace(directory: str) -> None:
    """Makes this process note in a file which functions of the package it runs; its forks do not."""
    last: dict[CodeType, int] = {}
    process = os.getpid()
    notes = os.open(f"{directory}/{process}", os.O_CREAT | os.O_APPEND | os.O_WRONLY)

    def called(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(PACKAGES) or os.getpid() != process:
            return
        now = time.time_ns()
        if now - last.get(code, 0) >= _EVERY_NS:
            last[code] = now
            name = code.co_filename.removeprefix(f"{ROOT}/")
            os.write(notes, f"{now}\t{name}\t{code.co_qualname}\t{threading.current_thread().name}\n".encode())

    threading.setprofile(called)
    sys.setprofile(called)


@dataclass
class Spans:
    """Moments of the session, in nanoseconds since the epoch."""

    quiet: list[tuple[int, int]] = field(default_factory=list)
    operation: tuple[int, int] = (0, 0)
    thread: str = ""
    """Only what this thread runs counts; empty: all threads."""


def touched(directory: Path, spans: Spans) -> dict[str, list[str]]:
    """The functions that only the operation ran, by file."""
    usual: set[tuple[str, str]] = set()
    ran: set[tuple[str, str]] = set()
    for file in directory.iterdir():
        for line in file.read_text().splitlines():
            at, name, function, thread = line.split("\t")
            moment, what = int(at), (name, function)
            if any(begin <= moment <= end for begin, end in spans.quiet):
                usual.add(what)
            elif spans.operation[0] <= moment <= spans.operation[1] and spans.thread in ("", thread):
                ran.add(what)
    found = defaultdict(list)
    for name, function in sorted(ran - usual):
        if not name.startswith(_TESTING):
            found[name].append(function)
    return dict(found)


def _ask(url: str, method: str = "GET", body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"content-type": "application/json"}, method=method)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@contextmanager
def _running_job(directory: Path, interval_ms: int) -> Iterator[tuple[str, str]]:
    """A session with a job that runs; yields the URLs of the session and of the job."""
    from ckpt_runtime.scheduler.job_status import JobStatus
    from ckpt_runtime.testing.mini_cluster import MiniCluster
    from tests.support.patience import patient

    MiniCluster.time_limit = staticmethod(patient)
    options = {"execution.checkpointing.dir": f"file://{directory}/checkpoints"}
    if interval_ms:
        options["execution.checkpointing.interval"] = f"{interval_ms} ms"
    with MiniCluster(rest=True, configuration={}) as cluster:
        pipeline = ROOT / "tests/support/pipelines/counted.py"
        job_id = cluster.submit(pipeline, arguments=[str(directory)], configuration=options, parallelism=2)
        cluster.wait_for_status(job_id, JobStatus.RUNNING)
        yield cluster.rest_url, f"{cluster.rest_url}/jobs/{job_id}"
        cluster.call(cluster.dispatcher.cancel_job(job_id))
        cluster.wait_for_status(job_id, JobStatus.CANCELED)


def _quiet(spans: Spans) -> None:
    begin = time.time_ns()
    time.sleep(_QUIET_S)
    spans.quiet.append((begin, time.time_ns()))


def patch(directory: Path) -> Spans:
    """Patches the checkpoint interval twice; the second one counts."""
    spans = Spans()
    with _running_job(directory, 0) as (_, job):
        for timeout_ms in (300_000, 200_000):
            spans.quiet, begin = [], time.time_ns()
            _ask(f"{job}/checkpoints/configuration", "PATCH", {"checkpointTimeout": timeout_ms})
            spans.operation = begin, time.time_ns()
            _quiet(spans)
    return spans


def checkpoint(directory: Path) -> Spans:
    """Lets periodic checkpoints complete; one of the later ones counts."""
    from tests.support.patience import patient

    done: list[Any] = []
    with _running_job(directory, 1_500) as (_, job):
        # A request between two checkpoints would be counted with one of them: there is one when enough of them are
        # complete.
        while len(done) < _CHECKPOINTS:
            time.sleep(patient(9))
            history = _ask(f"{job}/checkpoints")["history"]
            done = [item for item in reversed(history) if item["status"] == "COMPLETED"]
    begins = [(item["trigger_timestamp"] - 20) * 1_000_000 for item in done]
    ends = [(item["latest_ack_timestamp"] + 400) * 1_000_000 for item in done]
    quiet = [(end, begin) for end, begin in zip(ends[1:], begins[2:], strict=False)]
    return Spans(quiet, (begins[2], ends[2]))


def savepoint(directory: Path) -> Spans:
    """Runs the operator twice; the second run counts."""
    with _running_job(directory, 0) as (session, job):
        os.environ["AIRFLOW_CONN_CKPT_DEFAULT"] = json.dumps(
            {"conn_type": "ckpt", "host": "127.0.0.1", "port": int(session.rpartition(":")[2])}
        )
        from airflow_provider_ckpt.operators.savepoint import TakeSavepointOperator
        from tests.unit.provider.conftest import Task

        spans = Spans(thread="operator")
        for number in range(2):
            operator = TakeSavepointOperator(
                task_id=f"savepoint_{number}",
                job=job.rpartition("/")[2],
                deferrable=False,
                target_directory=f"file://{directory}/savepoints",
            )
            begin = time.time_ns()
            worker = threading.Thread(target=operator.execute, args=(Task().context(),), name="operator")
            worker.start()
            worker.join()
            spans.operation = begin, time.time_ns()
    return spans


OPERATIONS = {"patch": patch, "savepoint": savepoint, "checkpoint": checkpoint}


def main() -> int:
    """Counts the named operations, each in a fresh process; fails when one exceeds its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operations", nargs="*", choices=(*OPERATIONS, "all"), default="all")
    parser.add_argument("--functions", action="store_true", help="name the functions of each file as well")
    given = parser.parse_args()
    exceeded = False
    for name in OPERATIONS if "all" in given.operations else given.operations:
        with tempfile.TemporaryDirectory(prefix="files-touched-") as base:
            found = _measured(name, Path(base))
        exceeded |= len(found) > LIMITS[name]
        print(f"{name}: {len(found)} files, at most {LIMITS[name]} are aimed at")
        for file, functions in found.items():
            print(f"    {file}" + (f": {', '.join(functions)}" if given.functions else f" ({len(functions)})"))
    return int(exceeded)


def _measured(name: str, base: Path) -> dict[str, list[str]]:
    """Runs the operation in a forked process, which has imported nothing of the package yet."""
    notes, work = base / "notes", base / "work"
    for directory in (notes, work):
        directory.mkdir()
    result = base / "spans.json"
    pid = os.fork()
    if pid == 0:
        sys.path[:0] = [str(ROOT / "runtime"), str(ROOT)]
        trace(str(notes))
        code = 1
        try:
            spans = OPERATIONS[name](work)
            result.write_text(json.dumps([spans.quiet, spans.operation, spans.thread]))
            code = 0
        except BaseException:
            traceback.print_exc()
        os._exit(code)
    if os.waitpid(pid, 0)[1] != 0:
        raise SystemExit(f"{name}: the operation could not be measured")
    quiet, operation, thread = json.loads(result.read_text())
    return touched(notes, Spans([(begin, end) for begin, end in quiet], tuple(operation), thread))


if __name__ == "__main__":
    sys.exit(main())
