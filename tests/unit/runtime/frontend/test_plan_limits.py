"""What a pipeline may do while it is planned: print, take memory and time, and answer, all within limits."""

from __future__ import annotations

import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.frontend.planning_process import PLAN_LIMITS, PlanFailure, PlanRequest, plan_in_process
from tests.support.source_answers import planned

pytestmark = pytest.mark.usefixtures("process_template")

PIPELINE = "    spark.readStream.format('numbers').load().writeStream.format('noop').queryName('numbers').start()\n"


def plan(directory: Path, body: str, **limits: float) -> PlanFailure | None:
    lines = "".join(f"    {line}\n" for line in body.splitlines())
    (directory / "job.py").write_text(f"import os, sys, threading\ndef pipeline(spark):\n{lines}{PIPELINE}")
    allowed = replace(PLAN_LIMITS, **limits)
    result = planned(PlanRequest(str(directory), "job", (), {}), lambda request: plan_in_process(request, allowed))
    assert (result.job_graph is None) == (result.failure is not None)
    return result.failure


def test_the_archive_is_unpacked_in_the_process(tmp_path: Path) -> None:
    archive, directory = tmp_path / "job.zip", tmp_path / "unpacked"
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("job.py", f"def pipeline(spark):\n{PIPELINE}")
    directory.mkdir()
    result = planned(PlanRequest(str(directory), "job", (), {}, archive=str(archive)), plan_in_process)
    assert result.failure is None
    assert (directory / "job.py").exists()


def test_a_pipeline_that_prints_much_is_planned(tmp_path: Path) -> None:
    noise = "for _ in range(200):\n    sys.stdout.write('x' * 100_000)\n    sys.stderr.write('y' * 100_000)"
    assert plan(tmp_path, noise) is None


def test_too_much_memory_or_too_large_a_plan_fails_and_names_the_limit(tmp_path: Path) -> None:
    failure = plan(tmp_path, "self = bytearray(1 << 30)", memory_bytes=256 << 20)
    assert failure is not None
    assert failure.type == "MemoryError"
    assert "jobmanager.planning.memory" in failure.message
    failure = plan(tmp_path, "spark.conf.set('acme.x', 'x' * (20 << 20))")
    assert failure is not None
    assert "larger than the 8388608 allowed" in failure.message


def test_an_answer_that_cannot_be_printed(tmp_path: Path) -> None:
    for body in (
        "raise RuntimeError('\\ud800')",
        "class E(Exception):\n    def __str__(self): raise ValueError\nraise E",
        "raise RuntimeError('x' * (100 << 20))",
    ):
        failure = plan(tmp_path, body)
        assert failure is not None
        assert failure.type in ("RuntimeError", "E")
        assert len(failure.message) <= 1 << 16


@pytest.mark.parametrize(
    "content", ["garbage", "{}", "[]", "null", '{"error": 1}', '{"job_graph": {"name": []}}', "[" * 9_999]
)
def test_answer_that_is_not_a_plan_is_refused(tmp_path: Path, content: str) -> None:
    """User code may find the file of the answer and write to it."""
    failure = plan(
        tmp_path,
        "for number in range(3, 50):\n"
        "    try:\n"
        f"        os.pwrite(number, {content.encode()!r}, 0)\n"
        "        os.fsync(number)\n"
        "    except OSError: pass\n"
        "os._exit(0)",
    )
    assert failure is not None
    assert failure.type == "PlanProcessFailed"
