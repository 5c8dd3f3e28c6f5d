"""``@task.ckpt``: what becomes of a function of a DAG file, and of the job that runs it."""

from __future__ import annotations

import io
import json
import runpy
import zipfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from airflow.sdk import DAG, task
from msgspec.structs import replace

from airflow_provider_ckpt.decorators.ckpt import ckpt_task, source_of
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid, CkptProgramChanged
from ckpt_runtime.configuration.option import MAP
from ckpt_runtime.contract.configuration import JobConfig
from ckpt_runtime.jobmaster.gateway_values import StoredPipeline
from ckpt_runtime.scheduler.job_status import JobStatus
from tests.unit.provider.conftest import JobManager, Task, finish
from tests.unit.runtime.rest.fake_gateway import FakeJob

if TYPE_CHECKING:
    from pathlib import PurePath

FAST = {"defer_after": 0, "poll_interval": 0.01, "wait_timeout": 60}
LIMIT = 7


def sum(values: list[int]) -> int:  # noqa: A001
    """Hides the built-in function, as an import of PySpark's functions does."""
    return len(values)


def orders(spark: PurePath, path: str, columns: list[str] = ["a"], *, limit: int = 3) -> None:  # noqa: B006
    from json import dumps

    text = """
this text is not indented
"""
    spark.append((path, columns, limit, dumps(text)))  # type: ignore[attr-defined]


def with_global(spark: Any) -> None:
    spark.append(LIMIT)


def with_hidden_builtin(spark: Any) -> None:
    spark.append(sum([1]))


def with_default(spark: Any, limit: int = LIMIT) -> None: ...


def with_nested(spark: Any) -> None:
    class Inner:
        def method(self):  # type: ignore[no-untyped-def]
            return json.dumps(LIMIT)

    spark.append(Inner)


async def with_await(spark: Any) -> None: ...


def with_context(spark: Any, ds: str) -> None: ...


def without_spark(path: str) -> None: ...


def operator(function: Callable[..., Any], *args: Any, called: dict[str, Any] | None = None, **given: Any) -> Any:
    return ckpt_task(function, **{"task_id": "t", **FAST, **given})(*args, **(called or {})).operator


def run(program: str, tmp_path: Path, name: str, document: str) -> list[Any]:
    """What the program does with a list in the place of a session."""
    (tmp_path / "program.py").write_text(program)
    seen: list[Any] = []
    runpy.run_path(str(tmp_path / "program.py"))[name](seen, document)
    return seen


@pytest.mark.row("air.12")
def test_the_program_of_a_function_runs_without_its_file_and_gets_the_arguments(tmp_path: Path) -> None:
    built = operator(orders, "p", called={"limit": 5})
    built.settle(Task().context())
    filename, content = built.packed()
    assert (filename, built.entry) == ("orders.py", "orders:run_with_arguments")
    assert "PurePath" not in content.decode()
    seen = run(content.decode(), tmp_path, "run_with_arguments", built.args[0])
    assert seen == [("p", ["a"], 5, json.dumps("\nthis text is not indented\n"))]


def test_a_function_inside_another_is_taken_as_it_is(tmp_path: Path) -> None:
    def inner(spark: PurePath, path: str = "x") -> None:
        text = """
  two spaces"""
        spark.append(path + text)  # type: ignore[attr-defined]

    found = source_of(inner)
    assert run(found.text, tmp_path, "run_with_arguments", "[[], {}]") == ["x\n  two spaces"]


@pytest.mark.parametrize(
    ("function", "message", "line"),
    [
        (with_global, "'with_global' .* uses 'LIMIT' of the DAG file", 1),
        (with_hidden_builtin, "uses 'sum' of the DAG file", 1),
        (with_default, "uses 'LIMIT' of the DAG file", 0),
        (with_nested, "uses 'LIMIT' of the DAG file", 3),
        (with_await, "plain function", None),
        (with_context, "no parameter 'ds'.*{{ ds }}", None),
        (without_spark, "first parameter must be named spark", None),
        (lambda spark: None, "a function with a name", None),
    ],
)
def test_file_that_the_program_would_lack_is_refused_when_the_dag_is_parsed(
    function: Callable[..., Any], message: str, line: int | None
) -> None:
    where = "" if line is None else rf" \(line {function.__code__.co_firstlineno + line}\)"
    with pytest.raises(CkptArgumentInvalid, match=message + where):
        ckpt_task(function, task_id="t")()


def test_a_variable_of_an_enclosing_function_is_refused() -> None:
    path = "p"

    def closed(spark: Any) -> None:
        spark.append(path)

    with pytest.raises(CkptArgumentInvalid, match="uses 'path' of the DAG file"):
        source_of(closed)


def test_the_decorator_is_found_by_its_name_and_makes_one_task() -> None:
    with DAG("d", schedule=None) as dag:

        @task.ckpt(job_name="orders", on_change="refuse", retries=2)
        def stream(spark: Any, path: str) -> None:
            spark.read.load(path)

        built = stream("{{ ds }}")
    assert dag.task_ids == ["stream"]
    assert built.operator.on_change == "refuse"
    assert built.operator.op_args == ("{{ ds }}",)


@pytest.mark.row("air.12")
def test_a_later_run_attaches_to_the_job_until_the_program_changes(job_manager: JobManager, tmp_path: Path) -> None:
    first = finish(operator(orders, "p"), Task().context())
    assert (first["change"], first["name"]) == ("STARTED", "dag.t")
    job = job_manager.gateway.jobs[first["job_id"]]
    labels = MAP.parse(job.request.configuration["pipeline.global-job-parameters"])
    assert labels.pop("airflow.program")
    assert labels == {"airflow.dag-id": "dag", "airflow.task-id": "t", "airflow.run-id": "run"}
    again = finish(operator(orders, "p"), Task().context())
    assert (again["change"], again["job_id"]) == ("UNCHANGED", first["job_id"])
    assert set(again) == set(first)
    for changed in (
        operator(orders, "q", on_change="ignore"),
        operator(orders, "p", parallelism=3, on_change="ignore"),
    ):
        ignored = finish(changed, Task().context())
        assert (ignored["change"], ignored["job_id"]) == ("IGNORED", first["job_id"])
    with pytest.raises(CkptProgramChanged, match=f"job {first['job_id']} .* other arguments, and on_change"):
        finish(operator(orders, "q", on_change="refuse"), Task().context())
    assert len(job_manager.gateway.jobs) == 2


def test_a_program_that_the_session_stores_in_another_form_is_not_upgraded_by_each_run(
    job_manager: JobManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A session makes an archive of a single file, and the id of that."""
    gateway = job_manager.gateway
    store, shown = gateway.store_pipeline, FakeJob.config_info

    async def store_archive(filename: str, content: AsyncIterator[bytes]) -> StoredPipeline:
        data = b"".join([chunk async for chunk in content])

        async def archive() -> AsyncIterator[bytes]:
            yield b"archive of " + data

        return await store(filename, archive())

    def config_with_program(job: FakeJob) -> JobConfig:
        return replace(shown(job), pipeline_id=job.request.pipeline_id)

    monkeypatch.setattr(gateway, "store_pipeline", store_archive)
    monkeypatch.setattr(FakeJob, "config_info", config_with_program)
    first = finish(operator(orders, "p"), Task().context())
    again = finish(operator(orders, "p"), Task().context())
    assert (again["change"], again["job_id"]) == ("UNCHANGED", first["job_id"])


def test_next_job_of_a_name_starts_from_the_last_ones_checkpoint(job_manager: JobManager) -> None:
    first = finish(operator(orders, "p"), Task().context())
    _, path = job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[first["job_id"]])
    job_manager.gateway.move(first["job_id"], JobStatus.FAILED)
    second = finish(operator(orders, "p"), Task().context())
    assert (second["change"], second["started_from"]) == ("STARTED", path)
    job_manager.gateway.move(second["job_id"], JobStatus.FINISHED)
    third = finish(operator(orders, "p"), Task().context())
    assert (third["change"], third["started_from"]) == ("STARTED", None)
    job_manager.gateway.complete_checkpoint(job_manager.gateway.jobs[third["job_id"]])
    job_manager.gateway.move(third["job_id"], JobStatus.FAILED)
    assert finish(operator(orders, "p", start_over=True), Task().context())["started_from"] is None


def test_files_from_the_folder_of_the_dag_file_are_in_the_program() -> None:
    here = Path(__file__).parent
    built = operator(orders, "p", files=["conftest.py", str(here / "test_hook.py"), "../../data/flink_contract.md"])
    built.files = built.files[:2]
    filename, content = built.packed()
    names = zipfile.ZipFile(io.BytesIO(content)).namelist()
    assert (filename, names) == ("orders.zip", ["conftest.py", "orders.py", "test_hook.py"])
    assert operator(orders, "p", files=["conftest.py", "test_hook.py"]).packed()[1] == content
    for bad, message in ((["nosuch.py"], "files: 'nosuch.py'"), (["conftest.py"] * 2, "already has conftest.py")):
        with pytest.raises(CkptArgumentInvalid, match=message):
            operator(orders, "p", files=bad).packed()


def test_arguments_are_json_and_names_come_from_them(job_manager: JobManager) -> None:
    with pytest.raises(CkptArgumentInvalid, match="argument 'path' of orders: 'object' .* JSON"):
        operator(orders, called={"path": object()}).execute(Task().context())
    with pytest.raises(CkptArgumentInvalid, match="argument 0 of orders: 'list'"):
        operator(orders, [b"x"]).execute(Task().context())
    mapped = Task(map_index=0).context()
    with pytest.raises(CkptArgumentInvalid, match=r"a mapped task needs one .*\{country\}"):
        operator(orders, "p").execute(mapped)
    with pytest.raises(CkptArgumentInvalid, match="in braces .* path"):
        operator(orders, "p", job_name="orders-{country}").execute(mapped)
    built = operator(orders, "p", job_name="orders-{path}")
    built.settle(mapped)
    assert built.job_name == "orders-p"
    assert job_manager.received == []
