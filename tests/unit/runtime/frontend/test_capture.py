"""Capturing PySpark programs without Spark: what is asked of Spark, what is answered from earlier answers."""

from __future__ import annotations

import ast
import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from pyspark.errors import IllegalArgumentException
from pyspark.sql.streaming.listener import StreamingQueryListener
from pyspark.sql.types import StructType

from ckpt_runtime.frontend.analysis import views_read
from ckpt_runtime.frontend.capture import Capture, CapturedQuery
from ckpt_runtime.frontend.captured_session import captured_session
from ckpt_runtime.frontend.job import JobOptions
from ckpt_runtime.frontend.program import stop_in_time
from ckpt_runtime.frontend.scripts import ScriptEndedError, uses_session
from ckpt_runtime.frontend.typed_plan import (
    PLACEHOLDER_FILES,
    Analysis,
    AnalysisNeeded,
    AnalysisRequest,
    CreatedView,
    TypedColumn,
)
from ckpt_runtime.graph.errors import PlanError

STOP_AFTER = "execution.stop-after"
ANY_STOP = "query.stop() has no effect: the program's queries are one job, and it does not stop all of them"
COLUMNS = [("country", "string"), ("amount", "double")]


class Listener(StreamingQueryListener):
    """A listener of PySpark's that does nothing."""

    def onQueryStarted(self, event: Any) -> None: ...

    def onQueryProgress(self, event: Any) -> None: ...

    def onQueryIdle(self, event: Any) -> None: ...

    def onQueryTerminated(self, event: Any) -> None: ...


def capture(analyses: dict[str, str]) -> Capture:
    return Capture(analyses, lambda _: COLUMNS, lambda _key, _value: None)


def schema_of(given: Capture) -> list[str]:
    with captured_session(given, lambda _: None) as spark:
        frame = spark.readStream.format("replay").load("/data").hint("uid", "orders")
        return [field.name for field in frame.schema.fields]


def answered(question: str) -> dict[str, str]:
    analysis = Analysis(columns=(TypedColumn("country", "string"), TypedColumn("amount", "double")))
    return {sha256(question.encode()).hexdigest(): msgspec.json.encode(analysis).decode()}


def question_of(analyses: dict[str, str]) -> str:
    with pytest.raises(AnalysisNeeded) as needed:
        schema_of(capture(analyses))
    [question] = msgspec.json.decode(needed.value.text, type=list[msgspec.Raw])
    return bytes(question).decode()


def test_question_is_the_same_in_every_run_and_asked_once() -> None:
    question = question_of({})
    assert question_of({}) == question
    relation = msgspec.json.decode(question, type=AnalysisRequest).relation
    assert b"replay" not in relation
    assert b"uid" not in relation
    question = question_of({})
    assert schema_of(capture(answered(question))) == ["country", "amount"]
    with pytest.raises(PlanError, match="another plan each time"):
        schema_of(capture({"0" * 64: "{}"}))


def test_cached_answers_are_used_and_the_next_request_is_still_made() -> None:
    known = answered(question_of({}))
    given = capture({})
    given.remembered = {**known, "0" * 64: "{}"}
    assert schema_of(given) == ["country", "amount"]
    assert given.used == known
    other = capture({})
    other.remembered = {"0" * 64: "{}"}
    with pytest.raises(AnalysisNeeded):
        schema_of(other)


def test_error_of_spark_is_an_error_of_the_plan() -> None:
    [digest] = answered(question_of({}))
    with pytest.raises(PlanError, match="no such column"):
        schema_of(capture({digest: msgspec.json.encode(Analysis(error="no such column")).decode()}))


def test_action_on_a_frame_is_refused_by_sparks_message_if_it_reads_a_stream() -> None:
    with captured_session(capture({}), lambda _: None) as spark:
        frame = spark.readStream.format("replay").load("/data")
        with pytest.raises(PlanError, match=r"must be executed with writeStream\.start\(\)"):
            frame.where("amount > 1").show()
        with pytest.raises(PlanError, match="running Spark"):
            frame.cache()


def test_action_on_a_frame_without_a_stream_gives_the_rows_that_spark_has() -> None:
    def program(analyses: dict[str, str]) -> Any:
        with captured_session(capture(analyses), lambda _: None) as spark:
            return spark.range(2).collect()

    with pytest.raises(AnalysisNeeded) as needed:
        program({})
    [question] = msgspec.json.decode(needed.value.text, type=list[msgspec.Raw])
    assert msgspec.json.decode(question, type=AnalysisRequest).collected is True
    rows = pa.RecordBatch.from_pydict({"id": [0, 1]})
    with pa.ipc.new_stream(sink := pa.BufferOutputStream(), rows.schema) as writer:
        writer.write_batch(rows)
    answer = Analysis(columns=(TypedColumn("id", "long"),), rows=sink.getvalue().to_pybytes())
    answers = {sha256(bytes(question)).hexdigest(): msgspec.json.encode(answer).decode()}
    assert [row.id for row in program(answers)] == [0, 1]


def test_second_active_query_of_a_name_is_refused_as_in_spark() -> None:
    with captured_session(capture({}), lambda _: None) as spark:
        writer = spark.readStream.format("replay").load("/data").writeStream.format("noop").queryName("totals")
        first = writer.start()
        with pytest.raises(
            IllegalArgumentException, match=r"^Cannot start query with name totals as a query with that"
        ):
            writer.start()
        first.stop()
        assert writer.start().name == "totals"


def test_path_is_given_either_as_an_option_or_as_an_argument() -> None:
    given, legacy = capture({}), "spark.sql.legacy.pathOptionBehavior.enabled"
    with captured_session(given, lambda _: None) as spark:
        spark.conf.set(legacy, "false")
        with pytest.raises(PlanError, match=f"{legacy}: 'true' is not supported"):
            spark.conf.set(legacy, "true")
        reader = spark.readStream.format("replay").option("PATH", "/data")
        writer = reader.load().writeStream.option("path", "/out")
        writer.start()
        with pytest.raises(PlanError, match=r"load: There is a 'path' option set and load\(\) is called with a path"):
            reader.load("/data").writeStream.start("/out")
        with pytest.raises(PlanError, match=r"start: There is a 'path' option set and start\(\) is called with a path"):
            writer.start("/out")
    assert len(given.queries) == 1


def test_program_that_sleeps_after_it_has_started_a_query_is_planned_at_once() -> None:
    captured = capture({})
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        slept.append(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "sleep", sleep)
        with captured_session(captured, lambda _: None):
            time.sleep(1)
            captured.queries.append(CapturedQuery(None, Analysis()))
            time.sleep(2)
            other = threading.Thread(target=lambda: time.sleep(3))
            other.start()
            other.join()
        time.sleep(4)
    assert slept == [1, 3, 4], "before the first query, in another thread of the process, and after the program"


@pytest.mark.parametrize(
    ("source", "is_script"),
    [
        ("spark = SparkSession.builder.getOrCreate()", True),
        ("import pyspark.sql\nif True:\n    s = pyspark.sql.SparkSession.builder.getOrCreate()", True),
        ("def pipeline(spark: SparkSession): ...", False),
        ("def other():\n    SparkSession.builder.getOrCreate()", False),
        ("def main():\n    SparkSession.builder.getOrCreate()\nif __name__ == '__main__':\n    main()", True),
        ("def main(): ...\nif __name__ == '__main__':\n    main()", False),
        ("from sessions import spark\nspark.readStream.format('rate').load()", True),
        ("def main():\n    rows.writeStream.start()\nif __name__ == '__main__':\n    main()", True),
        ("def orders(spark):\n    return spark.readStream.table('orders')", False),
    ],
)
def test_script_is_a_module_that_uses_a_session_when_it_is_run(source: str, is_script: bool) -> None:
    assert uses_session(ast.parse(source)) is is_script


def test_builder_of_a_program_gives_the_captured_session_in_an_environment_of_spark_submit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from pyspark.sql import SparkSession

    monkeypatch.setenv("MASTER", "local[2]")
    with captured_session(capture({}), lambda _: None) as spark:
        assert SparkSession.builder.appName("any").config("spark.sql.shuffle.partitions", "2").getOrCreate() is spark
        assert SparkSession.builder.master("local[*]").getOrCreate() is spark
        spark.sparkContext.setLogLevel("WARN")
        with pytest.raises(PlanError, match=r"sparkContext\.parallelize.*functions of the SparkSession"):
            spark.sparkContext.parallelize([1])
    assert os.environ["MASTER"] == "local[2]"


def test_program_reads_options_of_its_job_and_gets_its_own_default_for_others() -> None:
    made = capture({})
    made.option = {"acme.region": "east", "parallelism.default": "2"}.get
    with captured_session(made, lambda _: None) as spark:
        keys = ("acme.region", "parallelism.default")
        assert [spark.conf.get(key, "other") for key in keys] == ["east", "2"]
        assert spark.conf.get("acme.region") == "east"
        assert spark.conf.get("acme.none", "other") == "other"
        assert spark.conf.get("spark.sql.session.timeZone") == "UTC"


def test_option_of_spark_has_the_value_that_the_program_has_set_until_it_is_unset() -> None:
    made = capture({})
    with captured_session(made, lambda _: None) as spark:
        for key, value, default in (
            ("spark.sql.shuffle.partitions", "7", "200"),
            ("spark.sql.session.timeZone", "Europe/Vienna", "UTC"),
            ("spark.sql.streaming.schemaInference", "true", "false"),
        ):
            spark.conf.set(key, value)
            assert spark.conf.get(key) == value
            spark.conf.unset(key)
            assert spark.conf.get(key, default) == default
        assert (made.configuration, made.infers_schemas) == ({}, False)
        with pytest.raises(PlanError, match=r"parallelism\.default.*do not set it"):
            spark.conf.unset("parallelism.default")


def test_named_query_has_a_location_in_the_directory_that_an_option_of_spark_names() -> None:
    made = capture({})
    with captured_session(made, lambda _: None) as spark:
        spark.conf.set("spark.sql.streaming.checkpointLocation", "/state/")
        writer = spark.readStream.format("replay").load("/data").writeStream.format("parquet")
        writer.start("/out")
        writer.queryName("b").start("/out")
        writer.queryName("c").start("/out")
        writer.queryName("d").option("checkpointLocation", "/own").start("/out")
    locations = [{key.lower(): value for key, value in query.start.options.items()} for query in made.queries]
    assert [each.get("checkpointlocation") for each in locations] == [None, "/state/b", "/state/c", "/own"]


def test_statement_that_sets_an_option_is_checked_and_kept_like_a_call() -> None:
    given = capture({})
    options: dict[str, str] = {}
    given.configure = options.__setitem__
    with captured_session(given, lambda _: None) as spark:
        spark.sql("SET spark.sql.streaming.metricsEnabled=true")
        spark.sql(" set  parallelism.default = 2 ;")
        spark.sql("SET spark.sql.session.timeZone = Europe/Vienna")
        with pytest.raises(PlanError, match="'least' is not one of min, max"):
            spark.sql("SET spark.sql.streaming.multipleWatermarkPolicy=least")
        assert spark.conf.get("spark.sql.session.timeZone") == "Europe/Vienna"
    assert options == {"parallelism.default": "2"}


def test_stream_of_files_has_sparks_hidden_column_only_where_it_is_named() -> None:
    questions = []
    with captured_session(capture({}), lambda _: None) as spark:
        files = spark.readStream.schema("country STRING, amount DOUBLE").parquet("/data")
        other = spark.readStream.format("replay").load("/data")
        for frame in (files, files.select("_metadata.file_name"), other.select("_metadata.file_name")):
            with pytest.raises(AnalysisNeeded) as needed:
                frame.schema  # noqa: B018
            questions.append(msgspec.json.decode(needed.value.text, type=list[AnalysisRequest])[-1].relation)
    assert [PLACEHOLDER_FILES.encode() in question for question in questions] == [False, True, False]


def test_schema_of_files_is_asked_of_spark_if_the_program_wants_it_inferred() -> None:
    with captured_session(capture({}), lambda _: None) as spark:
        spark.conf.set("spark.sql.streaming.schemaInference", "true")
        with pytest.raises(AnalysisNeeded) as needed:
            spark.readStream.json("/data").writeStream.format("console").start()
    [question] = msgspec.json.decode(needed.value.text, type=list[AnalysisRequest])
    assert b"/data" in question.relation
    given = capture(answered(needed.value.text[1:-1]))
    with captured_session(given, lambda _: None) as spark:
        spark.conf.set("spark.sql.streaming.schemaInference", "true")
        with pytest.raises(AnalysisNeeded):
            spark.readStream.json("/data").schema  # noqa: B018
    [source] = given.sources.values()
    assert StructType.fromJson(json.loads(source.schema)).names == ["country", "amount"]


def test_queries_of_a_script_are_active_until_it_has_waited_for_them() -> None:
    with captured_session(capture({}), lambda _: None) as spark:
        query = (
            spark.readStream.format("replay").load("/data").writeStream.format("parquet").queryName("q").start("/out")
        )
        assert [(found.id, found.name) for found in spark.streams.active] == [(query.id, "q")]
        assert spark.streams.get(query.id).name == "q"
        assert query.isActive
        assert (query.lastProgress, query.recentProgress, query.exception()) == (None, [], None)
        assert query.awaitTermination(1) is False
        while query.isActive:
            time.sleep(60)
        assert spark.streams.active == []
        assert query.awaitTermination(1)
        assert spark.streams.awaitAnyTermination(1)
        spark.streams.resetTerminated()
        assert spark.streams.get("00000000-0000-0000-0000-00000000ffff") is None
        with pytest.raises(PlanError, match=r"addListener.*ckpt events"):
            spark.streams.addListener(Listener())


@contextmanager
def started(count: int) -> Iterator[tuple[Capture, Any, list[Any]]]:
    """A capture, its session, and queries that its program has started."""
    given = capture({})
    with captured_session(given, lambda _: None) as spark:
        frame = spark.readStream.format("replay").load("/data")
        yield given, spark, [frame.writeStream.format("parquet").start(f"/out/{at}") for at in range(count)]


def stop_of(given: Capture) -> tuple[str | None, list[str]]:
    """When the job stops, and the warnings of that."""
    options = JobOptions({})
    warnings = stop_in_time(given, options)
    return options.own.get_text(STOP_AFTER), warnings


def test_job_stops_after_the_time_that_its_script_has_waited_before_it_stops_all_queries() -> None:
    with started(1) as (given, spark, [query]):
        assert query.awaitTermination(30) is False
        assert spark.streams.awaitAnyTermination(10) is False
        time.sleep(2)
        assert [each.id for each in spark.streams.active] == [query.id]
        for each in spark.streams.active:
            each.stop()
        assert not query.isActive
        assert query.awaitTermination(5)
        assert spark.streams.awaitAnyTermination(5)
        query.stop()  # has ended: another stop has no effect
    assert stop_of(given) == ("42000 ms", [])


def test_stop_behind_a_wait_without_limit_does_not_stop_the_job() -> None:
    with started(1) as (given, _, [query]):
        query.awaitTermination()
        query.stop()
    assert stop_of(given) == (None, [])


def test_job_of_several_queries_stops_with_the_last_one_that_is_stopped_and_only_if_all_are() -> None:
    with started(2) as (given, spark, [first, second]):
        time.sleep(1)
        first.stop()
        assert [each.id for each in spark.streams.active] == [second.id]
        assert spark.streams.awaitAnyTermination(9)
        spark.streams.resetTerminated()
        assert stop_of(given) == (None, [ANY_STOP])
        assert second.awaitTermination(3) is False
        second.stop()
    assert given.clock.active == []
    options = JobOptions({})
    [warning] = stop_in_time(given, options)
    assert "until the last one is stopped, 4.0 s" in warning
    assert options.own.get_text(STOP_AFTER) == "4000 ms"


def test_option_of_the_submission_is_stronger_than_the_stop_of_a_script() -> None:
    with started(1) as (given, _, [query]):
        query.stop()
    options = JobOptions({STOP_AFTER: "1 h"})
    assert stop_in_time(given, options) == []
    assert options.get(STOP_AFTER) == "1 h"


def test_query_that_only_processes_the_data_that_is_there_ends_with_it() -> None:
    with started(1) as (given, _, [query]):
        query.processAllAvailable()
        query.stop()
    assert given.queries[0].start.available_now
    assert stop_of(given) == (None, [])


@pytest.mark.parametrize("waits", [False, True])
def test_action_behind_the_start_of_queries_ends_the_program_and_no_later_stop_counts(waits: bool) -> None:
    with started(2) as (given, spark, [query, other]), pytest.raises(ScriptEndedError):
        query.processAllAvailable()
        if waits:
            query.awaitTermination(10)
        try:
            spark.range(3).count()
        finally:
            query.stop()
            other.stop()
    assert [each.start.available_now for each in given.queries] == [not waits, False]
    assert stop_of(given) == (None, [])


def test_program_changes_no_files_and_tables_behind_the_start_of_its_queries() -> None:
    with started(1) as (_, spark, _):
        with pytest.raises(PlanError, match="not behind their start"):
            spark.sql("insert into numbers values (1)")
        with pytest.raises(PlanError, match="needs a running Spark"):
            spark.range(1).write.parquet("/numbers")


def test_query_that_ends_with_its_data_has_ended_when_the_script_waits_for_it() -> None:
    with started(0) as (given, spark, _):
        frame = spark.readStream.format("replay").load("/data")
        first, second = (frame.writeStream.format("parquet").trigger(availableNow=True).start("/out") for _ in range(2))
        assert spark.streams.awaitAnyTermination(1)
        assert [each.id for each in spark.streams.active] == [second.id]
        assert second.awaitTermination(60)
        endless = frame.writeStream.format("parquet").start("/out")
        assert endless.awaitTermination(1) is False
        endless.stop()
        first.stop()
    assert stop_of(given) == (None, [ANY_STOP])  # a stop of the job could come before the data of the others ends


def test_query_that_ends_with_its_data_is_not_cut_short_by_a_stop() -> None:
    for stops_session in (False, True):
        with started(0) as (given, spark, _):
            frame = spark.readStream.format("replay").load("/data")
            query = frame.writeStream.format("parquet").trigger(availableNow=True).start("/out")
            time.sleep(10)
            (spark if stops_session else query).stop()
            assert not query.isActive
        assert stop_of(given) == (None, [])


def test_end_of_the_session_stops_queries_for_which_the_script_has_waited() -> None:
    for waits, wanted in ((False, None), (True, "3000 ms")):
        with started(2) as (given, spark, _):
            if waits:
                time.sleep(3)
            spark.stop()
        assert stop_of(given) == (wanted, [])


def test_loop_that_waits_for_ever_ends_the_script_and_warns() -> None:
    with started(1) as (given, _, [query]), pytest.raises(ScriptEndedError, match="again and again"):
        try:
            while True:
                time.sleep(1)
        finally:
            query.stop()
    assert "without a limit of time" in given.clock.warnings[0]
    assert stop_of(given) == (None, [])


def test_session_that_keeps_its_capture_asks_each_question_once() -> None:
    answers: dict[str, str] = {}
    kept = capture(answers)
    for number in range(60):  # more than one request may hold
        request = AnalysisRequest(ddl=f"c{number} INT")
        with pytest.raises(AnalysisNeeded) as needed:
            kept.analysis_of(request)
        [question] = msgspec.json.decode(needed.value.text)
        answers[sha256(msgspec.json.encode(question)).hexdigest()] = msgspec.json.encode(Analysis()).decode()
        kept.forget_questions()
        kept.analysis_of(request)
    kept.require_answers()


def test_option_of_spark_that_would_change_results_has_its_default_value_only() -> None:
    with captured_session(capture({}), lambda _: None) as spark:
        spark.conf.set("spark.sql.parser.escapedStringLiterals", "False")
        with pytest.raises(PlanError, match="escapedStringLiterals: 'true' is not supported; .* 'false' only"):
            spark.conf.set("spark.sql.parser.escapedStringLiterals", "true")


def test_options_that_decide_when_event_time_advances_are_kept() -> None:
    given = capture({})
    with captured_session(given, lambda _: None) as spark:
        spark.conf.set("spark.sql.streaming.multipleWatermarkPolicy", "MAX")
        spark.conf.set("spark.sql.streaming.noDataMicroBatches.enabled", "false")
        assert list(given.event_time.values()) == ["MAX", "false"]
        spark.conf.unset("spark.sql.streaming.multipleWatermarkPolicy")
    assert given.event_time == {"spark.sql.streaming.noDataMicroBatches.enabled": "false"}


def test_frames_in_a_text_of_sql_make_the_same_question_in_every_run() -> None:
    def asked() -> bytes:
        with pytest.raises(AnalysisNeeded) as needed, captured_session(capture({}), lambda _: None) as spark:
            one, other = (spark.readStream.format("replay").load("/data") for _ in range(2))
            assert spark.sql("SELECT * FROM {one} UNION ALL SELECT * FROM {other}", one=one, other=other).schema
        [request] = msgspec.json.decode(needed.value.text, type=list[AnalysisRequest])
        return request.relation

    assert asked() == asked()
    assert b"temp_view_%032d" % 0 in asked()
    assert b"temp_view_%032d" % 1 in asked()


def test_statement_that_creates_a_view_is_parsed_by_spark_and_becomes_a_view_of_the_program() -> None:
    given = capture({})
    statements: dict[str, CreatedView] = {}

    def run(statement: str, **view: Any) -> None:
        statements[statement] = CreatedView(**{"name": "big", "columns": (), "replaces": False, "keeps": False, **view})
        answers = {
            sha256(msgspec.json.encode(AnalysisRequest(statement=text))).hexdigest(): msgspec.json.encode(
                Analysis(view=found)
            ).decode()
            for text, found in statements.items()
        }
        given.analyses = answers
        with captured_session(given, lambda _: None) as spark:
            spark.sql(statement)

    run("CREATE TEMP VIEW big (w) AS SELECT v FROM rows", query="SELECT v FROM rows", columns=("w",))
    assert b"SELECT v FROM rows" in given.views["big"]
    assert b"CREATE" not in given.views["big"]
    run("create temporary view if not exists BIG as select 1", query="select 1", keeps=True, name="BIG")
    assert list(given.views) == ["big"]
    with pytest.raises(PlanError, match="the temporary view 'big' exists; use CREATE OR REPLACE"):
        run("CREATE TEMP VIEW big AS SELECT 2", query="SELECT 2")
    run("CREATE OR REPLACE TEMP VIEW big AS SELECT 3", query="SELECT 3", replaces=True)
    assert b"SELECT 3" in given.views["big"]


@pytest.mark.parametrize(
    ("text", "read"),
    [
        (b"SELECT * FROM Total", ["rows", "Total"]),
        (b"SELECT * FROM `rows`", ["rows"]),
        (b"SELECT 1", []),
        (b"SELECT * FROM IDENTIFIER('to' || 'tal')", ["rows", "Total", "other"]),
    ],
)
def test_views_that_a_text_may_read_are_those_that_it_names_and_theirs(text: bytes, read: list[str]) -> None:
    views = {"rows": b"a source", "Total": b"SELECT count(*) FROM ROWS", "other": b"SELECT * FROM dropped"}
    assert list(views_read([text], views)) == read
    assert list(views_read([text], {**views, "größe": b""})) == [*read, "größe"]
