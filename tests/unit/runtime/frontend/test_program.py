"""Loading a pipeline from an archive directory, in this process and in the plan process."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from ckpt_runtime.frontend.planning_process import PLAN_LIMITS, PlanRequest, plan_in_process, run
from ckpt_runtime.frontend.program import load_plan, parse_entry
from ckpt_runtime.frontend.typed_plan import AnalysisNeeded
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.errors import PlanError
from tests.support.source_answers import answers_to, planned

PIPELINE = """
import helper

print("noise on standard output")

def pipeline(spark, *args):
    (spark.readStream.format("numbers").option("rows", args[0]).load().hint("uid", helper.UID)
        .writeStream.format("noop").queryName("all").start())

def broken(spark, *args):
    raise RuntimeError("the author's own error")

def leaves(spark, *args):
    raise SystemExit(3)
"""


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    (tmp_path / "job.py").write_text(PIPELINE)
    (tmp_path / "helper.py").write_text("UID = 'first'")
    return tmp_path


@pytest.fixture(autouse=True)
def _clean_import_state() -> Iterator[None]:
    path, modules = list(sys.path), dict(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - set(modules):
        if name == "helper" or name.startswith("_ckpt_pipeline_"):
            del sys.modules[name]


def loaded(archive: Path, entry: str, *args: str) -> CompiledPlan:
    """The plan of a program whose request to Spark is answered."""
    try:
        return load_plan(archive, entry, args, {})
    except AnalysisNeeded as question:
        return load_plan(archive, entry, args, {}, analyses=answers_to(question.text))


def uids(archive: Path, entry: str = "job") -> list[str]:
    plan = loaded(archive, entry, "5")
    return [node.uid for vertex in plan.job_graph.vertices for node in vertex.operators]


@pytest.mark.parametrize("entry", ["job", "job:pipeline", "job.py:pipeline"])
def test_an_entry_names_a_module_and_a_function(archive: Path, entry: str) -> None:
    assert uids(archive, entry) == ["first", "all-sink"]


def test_another_archive_brings_its_own_modules(archive: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    assert uids(archive) == ["first", "all-sink"]
    second = tmp_path_factory.mktemp("second")
    (second / "job.py").write_text(PIPELINE)
    (second / "helper.py").write_text("UID = 'second'")
    assert uids(second) == ["second", "all-sink"]
    assert uids(archive) == ["first", "all-sink"]
    assert str(second) not in sys.path


def test_a_module_named_like_an_installed_one_is_the_authors(archive: Path) -> None:
    (archive / "json.py").write_text(PIPELINE)
    assert uids(archive, "json") == ["first", "all-sink"]
    assert not hasattr(sys.modules["json"], "pipeline")


def test_a_package_may_hold_the_entry(archive: Path) -> None:
    package = archive / "flow_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "main.py").write_text("from flow_package.parts import pipeline")
    (package / "parts.py").write_text(PIPELINE)
    assert uids(archive, "flow_package.main") == ["first", "all-sink"]


@pytest.mark.parametrize("entry", ["", "../job", "job:a.b", "job:", "/etc/passwd", "job:pipe line", "a..b"])
def test_an_entry_is_never_a_path(entry: str) -> None:
    if entry == "job:":
        assert parse_entry(entry) == ("job", "pipeline")
        return
    with pytest.raises(PlanError, match="entry: .* is not of the form 'module:function'"):
        parse_entry(entry)


def test_missing_modules_and_functions_are_named(archive: Path) -> None:
    with pytest.raises(PlanError, match="entry: there is no module 'nope' in the archive"):
        load_plan(archive, "nope", [], {})
    with pytest.raises(PlanError, match="entry: there is no module 'os.path' in the archive"):
        load_plan(archive, "os.path:join", [], {})
    with pytest.raises(PlanError, match="entry: module 'job' has no function 'nope'"):
        load_plan(archive, "job:nope", [], {})


def request(archive: Path, entry: str, *args: str, **configuration: str) -> PlanRequest:
    return PlanRequest(str(archive), entry, args, configuration)


def test_errors_become_results_with_the_authors_frames_only(archive: Path) -> None:
    failure = run(request(archive, "job:broken")).failure
    assert failure is not None
    assert str(failure) == "RuntimeError: the author's own error"
    assert 'File "job.py"' in failure.traceback
    assert "entry_point" not in failure.traceback
    assert str(archive) not in failure.traceback
    left = run(request(archive, "job:leaves")).failure
    assert left is not None
    assert left.type == "SystemExit"
    refused = run(request(archive, "job", "-1")).failure
    assert refused is not None
    assert str(refused) == "option 'rows': -1 is less than the minimum 0"
    option = planned(request(archive, "job", "1", **{"parallelism.default": "none"}), run).failure
    assert option is not None
    assert str(option).startswith("parallelism.default: 'none' is not acceptable")


def test_path_of_files_has_to_exist_when_a_job_is_submitted_unless_a_query_of_the_job_writes_it(archive: Path) -> None:
    (archive / "files.py").write_text(
        "def pipeline(spark, source, target):\n"
        "    rows = spark.readStream.schema('a INT').parquet(source)\n"
        "    rows.writeStream.option('checkpointLocation', '/c').start(target)\n"
    )
    away, out = f"{archive}/away", f"{archive}/out"
    found = {}
    for source in (away, f"file://{away}", f"{away}/*", str(archive), out):
        again = request(archive, "files", source, out)
        assert planned(again, run).failure is None, "a job that runs is planned again"
        failure = planned(replace(again, submitted=True), run).failure
        found[source] = failure and str(failure)
    message = "load: [PATH_NOT_FOUND] Path does not exist: {}. SQLSTATE: 42K03"
    missing = {path: message.format(path) for path in (away, f"file://{away}")}
    assert found == {f"{away}/*": None, str(archive): None, out: None, **missing}
    (archive / "out" / "_spark_metadata").mkdir(parents=True)
    again = request(archive, "files", str(archive), out)
    assert planned(again, run).failure is None
    refused = str(planned(replace(again, submitted=True), run).failure)
    assert refused.startswith(f"option 'path': a streaming query of Spark has written to {out!r}, and Spark reads only")


READS_BACK = """
from pyspark.sql import SparkSession
spark = SparkSession.builder.getOrCreate()
numbers = spark.readStream.format("numbers").option("rows", 5).load()
numbers.writeStream.format("noop").trigger(availableNow=True).start().awaitTermination()
spark.read.parquet("/out").show()
"""


def test_script_runs_up_to_where_it_reads_rows_behind_its_queries_and_may_write_no_stream_there(archive: Path) -> None:
    (archive / "job.py").write_text(READS_BACK)
    warning = loaded(archive, "job").warnings[-1]
    assert warning.startswith("the program is run up to line 6 of job.py, which reads rows behind the start")
    (archive / "job.py").write_text(f"{READS_BACK}numbers.writeStream.format('noop').start()")
    with pytest.raises(PlanError, match=r"line 6 of job.py: it reads rows .*, and line 7 of job.py .* --client"):
        loaded(archive, "job")


ONE_START = "    numbers.writeStream.format('noop').trigger(availableNow=True).start().awaitTermination()\n"
SHOWN = "    spark.range(3).show()\n"
CALLED = "if __name__ == '__main__':\n"


@pytest.mark.parametrize(
    ("text", "lost"),
    [
        (f"def main():\n{ONE_START}{SHOWN}{CALLED}    main()\n", None),
        (f"def later():\n{ONE_START}if True:\n{ONE_START}{SHOWN}    later()\n", 5),
        (f"def main():\n{ONE_START}{SHOWN}main()\nmain()\n", 5),
        (f"def main():\n{ONE_START}{SHOWN}for at in range(2):\n    main()\n", 5),
        (f"for at in range(2):\n{ONE_START}{SHOWN}", 5),
        (f"if True:\n    writer = numbers.writeStream.format('noop')\n{ONE_START}{SHOWN}    writer.start()\n", 8),
        (f"import yaml\nif True:\n{ONE_START}{SHOWN}", 4),
        (f"import helper\nif True:\n{ONE_START}{SHOWN}    helper.later(numbers)\n", 2),
        (f"if True:\n{ONE_START}for at in range(2):\n{SHOWN}", None),
    ],
)
def test_program_is_refused_at_rows_behind_its_queries_unless_no_query_can_start_later(
    archive: Path, text: str, lost: int | None
) -> None:
    head = "".join(READS_BACK.splitlines(keepends=True)[:4]).lstrip()
    (archive / "helper.py").write_text(f"def later(numbers):\n{ONE_START}")
    if "helper" not in text:
        (archive / "helper.py").unlink()
    (archive / "job.py").write_text(f"{head}{text}")
    if lost is None:
        assert "the program is run up to line" in loaded(archive, "job").warnings[-1]
        return
    with pytest.raises(PlanError, match=rf"and line {lost} of (job|helper)\.py may start a query later"):
        loaded(archive, "job")


IN_STAGES = """
def pipeline(spark, directory, trigger, waits):
    chosen = {trigger: True} if trigger != "none" else {"processingTime": "1 second"}
    numbers = spark.readStream.format("numbers").option("rows", 5).load()
    first = numbers.writeStream.trigger(availableNow=True).start(f"file://{directory}/first")
    if waits == "yes":
        first.awaitTermination()
    stage = spark.readStream.schema("number BIGINT").parquet(f"{directory}/first/")
    if trigger == "static":
        stage, chosen = numbers.join(spark.read.parquet(f"{directory}/first"), "number"), {}
    stage.writeStream.format("noop").trigger(**(chosen or {"availableNow": True})).start()
"""


def test_query_may_not_read_behind_a_wait_what_an_earlier_query_wrote_unless_it_runs_on(archive: Path) -> None:
    (archive / "job.py").write_text(IN_STAGES)
    for trigger in ("availableNow", "once", "static"):
        with pytest.raises(PlanError, match="/first' is written by an earlier query, which has ended"):
            loaded(archive, "job", str(archive), trigger, "yes")
    loaded(archive, "job", str(archive), "availableNow", "no")
    loaded(archive, "job", str(archive), "none", "yes")


@pytest.mark.usefixtures("process_template")
def test_the_plan_process_gives_the_same_graph_and_ignores_noise(archive: Path) -> None:
    result = planned(request(archive, "job", "5"), plan_in_process)
    assert result.failure is None
    assert result.job_graph is not None
    assert result.job_graph.fingerprint == loaded(archive, "job", "5").job_graph.fingerprint
    assert "job" not in sys.modules


@pytest.mark.usefixtures("process_template")
def test_plan_process_returns_the_options_that_the_pipeline_set(archive: Path) -> None:
    (archive / "sets.py").write_text(
        "def pipeline(spark):\n"
        "    spark.conf.set('execution.checkpointing.interval', '5 s')\n"
        "    spark.readStream.format('numbers').load().writeStream.format('noop').start()\n"
    )
    defaults = {"execution.checkpointing.interval": "1 h", "acme.region": "east"}
    result = planned(PlanRequest(str(archive), "sets", (), {"acme.region": "west"}, defaults), plan_in_process)
    assert result.failure is None
    assert result.job_graph is not None
    assert result.own_configuration == {"execution.checkpointing.interval": "5 s"}
    assert result.job_graph.configuration == {"execution.checkpointing.interval": "5 s", "acme.region": "west"}


@pytest.mark.usefixtures("process_template")
def test_a_plan_process_that_dies_or_hangs_is_a_failure(archive: Path) -> None:
    (archive / "dies.py").write_text("import os, sys\nsys.stderr.write('last words')\nsys.stderr.flush()\nos._exit(9)")
    died = plan_in_process(request(archive, "dies")).failure
    assert died is not None
    assert (died.type, "code 9" in died.message, "last words" in died.traceback) == ("PlanProcessFailed", True, True)
    (archive / "hangs.py").write_text("import threading\nthreading.Event().wait()")
    hung = plan_in_process(request(archive, "hangs"), replace(PLAN_LIMITS, time_s=3)).failure
    assert hung is not None
    assert hung.type == "PlanTimeout"
