"""A script runs again up to the start of one query, with the answers that its client got before."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from textwrap import dedent

import msgspec
import pyarrow as pa
import pytest
from pyspark.sql.connect.proto import ExecutePlanResponse
from pyspark.sql.connect.types import pyspark_types_to_proto_types
from pyspark.sql.types import LongType, StructType

from ckpt_runtime.frontend.program import load_plan
from ckpt_runtime.frontend.recorded_script import ENTRY, FILE_NAME, PROGRAM, Answer, RecordedScript
from ckpt_runtime.frontend.typed_plan import AnalysisNeeded
from ckpt_runtime.graph.errors import PlanError

START = "spark.readStream.format('rate').load().where(f'value > {least}').writeStream.format('noop').start()"
REACHED = "value > 7"


def responses(response: ExecutePlanResponse) -> list[bytes]:
    """A response and the one that ends the operation, as those to another session."""
    last = ExecutePlanResponse(session_id="that of the client", operation_id="the client's", response_id="2")
    last.result_complete.SetInParent()
    return [response.SerializeToString(), last.SerializeToString()]


def rows(value: int) -> list[bytes]:
    """The responses to an action, with one row of one column."""
    table = pa.table({"least": pa.array([value], pa.int64())})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    response = ExecutePlanResponse(session_id="that of the client", operation_id="the client's", response_id="1")
    response.schema.CopyFrom(pyspark_types_to_proto_types(StructType().add("least", LongType())))
    response.arrow_batch.row_count, response.arrow_batch.data = 1, sink.getvalue().to_pybytes()
    return responses(response)


ACTION = Answer("", rows(7))


def questions(directory: Path, script: str, *answers: Answer) -> str:
    """Runs a script again; returns the plans about which it asks Spark then, each as text."""
    source = f"from pyspark.sql import SparkSession\nspark = SparkSession.builder.getOrCreate()\n{dedent(script)}"
    (directory / "script.py").write_text(source)
    (directory / f"{ENTRY}.py").write_text(PROGRAM)
    (directory / FILE_NAME).write_bytes(msgspec.json.encode(RecordedScript("script", ["one"], list(answers))))
    with pytest.raises(AnalysisNeeded) as needed:
        load_plan(directory, f"{ENTRY}:pipeline", (), {})
    plans = [base64.b64decode(each["relation"]) for each in json.loads(needed.value.text)]
    return b"\n".join(plans).decode("latin-1")


def test_an_action_has_the_rows_that_the_client_got(tmp_path: Path) -> None:
    assert REACHED in questions(tmp_path, f"least = spark.range(9).first()[0]\n{START}", ACTION)


def test_queries_before_the_recorded_one_are_not_planned(tmp_path: Path) -> None:
    started = ExecutePlanResponse()
    started.write_stream_operation_start_result.query_id.id = "a query"
    status = ExecutePlanResponse()
    status.streaming_query_command_result.status.is_active = True
    script = f"""
    least = 3
    query = {START}
    assert (query.id, query.isActive) == ("a query", True)
    least = 7
    {START}
    raise AssertionError("the script runs up to the start of the query")
    """
    answers = (
        Answer("write_stream_operation_start", responses(started)),
        Answer("streaming_query_command", responses(status)),
    )
    asked = questions(tmp_path, script, *answers)
    assert REACHED in asked
    assert "value > 3" not in asked


def test_an_error_that_the_client_got_is_raised_again(tmp_path: Path) -> None:
    script = f"""
    from pyspark.errors import PySparkException
    try:
        spark.range(9).first()
    except PySparkException as error:
        least = 7 if "no such table" in str(error) else 0
    {START}
    """
    assert REACHED in questions(tmp_path, script, Answer("", code=3, message="no such table"))


def test_the_clock_of_the_script_and_of_no_other_thread_shows_the_time_of_its_client(tmp_path: Path) -> None:
    script = f"""
    import time
    from concurrent.futures import ThreadPoolExecutor
    began = time.time(), time.monotonic()
    time.sleep(10_000)
    least = spark.range(9).first()[0]
    for clock, start in zip((time.time, time.monotonic), began):
        assert 19_000 < clock() - start < 30_000
        with ThreadPoolExecutor() as others:
            assert others.submit(clock).result() - start < 9_000
    {START}
    """
    before = time.monotonic()
    assert REACHED in questions(tmp_path, script, Answer("", rows(7), after_s=20_000))
    assert time.monotonic() - before < 9_000


def test_a_clause_that_needs_the_query_ends_the_script(tmp_path: Path) -> None:
    script = f"""
    least = 7
    try:
        query = {START}
    finally:
        query.stop()
    """
    assert REACHED in questions(tmp_path, script)


@pytest.mark.parametrize(
    ("script", "answers", "message"),
    [
        (
            "spark.range(9).first()",
            (Answer("sql_command"),),
            "and sent sql_command there",
        ),
        ("spark.range(9).first()", (), "sends an action when it runs again"),
        ("pass", (), "the script ends before it starts the query"),
    ],
)
def test_a_script_that_takes_another_way_is_refused(
    tmp_path: Path, script: str, answers: tuple[Answer, ...], message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        questions(tmp_path, script, *answers)
