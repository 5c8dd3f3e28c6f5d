"""The same PySpark programs in Structured Streaming and in the engine, over the same files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from pyspark.sql.connect.proto import CommonInlineUserDefinedFunction, Relation

from ckpt_runtime.frontend.analysis import ANALYZER
from ckpt_runtime.frontend.catalog_tables import StaticTables
from ckpt_runtime.frontend.typed_plan import AnalysisRequest
from ckpt_runtime.graph.schema import DocumentError
from ckpt_runtime.jobmaster.gateway_values import SubmissionFailed
from ckpt_runtime.scheduler.job_status import JobStatus
from ckpt_runtime.testing.mini_cluster import MiniCluster
from tests.support.jobs import PIPELINES, fast
from tests.support.parity import NOT_ON_STREAMS, compare_examples, page, pyspark_functions, shown, statuses
from tests.support.pipelines import spark_programs

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.timeout(600)]

PROGRAM, SCRIPT = PIPELINES / "spark_programs.py", PIPELINES / "spark_script.py"
FUNCTIONS_PAGE = Path(__file__).parents[2] / "docs" / "functions.md"
KEYS = {"windows": ("start", "country"), "by_letter": ("country",)}
"""Queries in update mode: the last row of each key counts, since both systems write others before it."""


def result(directory: Path, name: str) -> Counter[str]:
    rows = pq.read_table(directory / name).to_pylist()
    keys = KEYS.get(name)
    if keys:
        rows = list({tuple(row[key] for key in keys): row for row in rows}.values())
    return Counter(str(shown(row)) for row in rows)


def in_spark(spark: SparkSession, orders: str, name: str) -> Counter[str]:
    """The query as a batch over the same rows: what a stream in Spark has written when all of them are in."""
    rows = spark.read.schema(spark_programs.SCHEMA).parquet(orders)
    rows.createOrReplaceTempView("orders")
    frame, _ = spark_programs.queries(spark, rows)[name]
    return Counter(str(shown(row)) for row in frame.toArrow().to_pylist())


@pytest.mark.row("ps.1", "ps.2", "ps.5", "ps.6", "ps.8")
def test_program_of_pyspark_gives_the_rows_of_spark_for_each_query(
    spark: SparkSession, cluster: MiniCluster, orders: str, tmp_path: Path
) -> None:
    job = cluster.submit(PROGRAM, arguments=["replay", orders, str(tmp_path)], configuration=fast())
    cluster.wait_for_status(job, JobStatus.FINISHED)
    for name in ("computed", "by_letter", "windows", "both", "dealt"):
        assert result(tmp_path, name) == in_spark(spark, orders, name), name


@pytest.mark.row("ps.1", "ps.8")
def test_script_of_pyspark_runs_unchanged_in_spark_and_in_the_engine(
    spark: SparkSession, cluster: MiniCluster, orders: str, tmp_path: Path
) -> None:
    job = cluster.submit(SCRIPT, arguments=["replay", orders, str(tmp_path)], configuration=fast())
    frame_plan, query_plan = cluster.call(cluster.dispatcher.job_details(job)).graph.explained
    assert "filter, no uid, parallelism 1\n    input: (1) FORWARD\n    vectorised" in frame_plan
    assert "sink parquet" in query_plan
    assert "sink" not in frame_plan
    cluster.wait_for_status(job, JobStatus.FINISHED)
    frame = spark.read.schema("country STRING, amount DOUBLE").parquet(orders)
    wanted = frame.filter("country IS NOT NULL").selectExpr("country", "amount * 2 AS amount").toArrow().to_pylist()
    assert result(tmp_path, "doubled") == Counter(str(shown(row)) for row in wanted)


@pytest.mark.long
@pytest.mark.row("ps.4")
def test_examples_of_all_functions_are_equal_to_spark_or_refused(spark: SparkSession) -> None:
    examples = compare_examples(spark)
    assert [(example.query, example.note) for example in examples if example.kind == "differs"] == []
    assert page(examples) == FUNCTIONS_PAGE.read_text(), "`make docs` writes the page"


def test_every_function_of_pyspark_is_on_the_page_of_functions() -> None:
    text, _, others = FUNCTIONS_PAGE.read_text().partition("## Others")
    compared, listed = (set(re.findall(r"`([^`]+)`", part)) for part in (text, others))
    assert [name for name in pyspark_functions() if name not in compared | listed] == []
    assert compared.isdisjoint(NOT_ON_STREAMS)


@pytest.mark.row("ps.4")
def test_examples_of_each_tenth_function_give_what_the_page_says(spark: SparkSession) -> None:
    examples = compare_examples(spark, every=10)
    assert [(example.query, example.note) for example in examples if example.kind == "differs"] == []
    found = {name: status for functions in statuses(examples).values() for name, status in functions.items()}
    lines = re.findall(r"^(Equal|Partly|Clock|Random|Refused): (.*)\.$", FUNCTIONS_PAGE.read_text(), re.MULTILINE)
    listed = {name: title.lower() for title, names in lines for name in re.findall(r"`([^`]+)`", names)}
    assert found == {name: listed.get(name) for name in found}, "`make docs` writes the page"
    assert len(found) > 30


@pytest.mark.row("ps.2")
@pytest.mark.parametrize(
    ("case", "named"),
    [
        ("random plan", "another plan"),
        pytest.param("function", r"Sentences.*called in refused_programs.py:\d+", marks=pytest.mark.long),
        pytest.param("type", "interval", marks=pytest.mark.long),
        ("column", r"UNRESOLVED_COLUMN(.|\n)*refused_programs.py\", line \d+"),
        ("operation", "orderBy: a stream has no last row"),
        pytest.param("session", "another column", marks=pytest.mark.long),
        pytest.param("aggregate", "CountMinSketchAgg", marks=pytest.mark.long),
        pytest.param("distinct", "DISTINCT", marks=pytest.mark.long),
        ("output mode", "append mode"),
        pytest.param("action", r"must be executed with writeStream\.start", marks=pytest.mark.long),
        pytest.param("pattern", "GGGG", marks=pytest.mark.long),
        pytest.param("partitions of a function", "partitionBy: foreach and foreachBatch", marks=pytest.mark.long),
        pytest.param("memory", "start the query from a client that is connected", marks=pytest.mark.long),
        ("legacy option", "spark.sql.legacy"),
        pytest.param("barrier", "barrier", marks=pytest.mark.long),
        pytest.param("generator", "json_tuple with names that are not constant", marks=pytest.mark.long),
        pytest.param("observe", "CollectList in observe(.|\n)*it keeps all values", marks=pytest.mark.long),
        ("Python in a lambda", "lambda"),
        pytest.param("Avro in SQL", r"UNRESOLVED_ROUTINE(.|\n)*`from_avro`", marks=pytest.mark.long),
    ],
)
def test_program_that_the_engine_cannot_run_is_refused_by_name_when_it_is_submitted(
    cluster: MiniCluster, orders: str, tmp_path: Path, case: str, named: str
) -> None:
    with pytest.raises(SubmissionFailed, match=named):
        cluster.submit(PIPELINES / "refused_programs.py", arguments=[orders, str(tmp_path), case])


@pytest.mark.parametrize(
    ("sql", "named"),
    [
        ("SELECT * FROM VALUES (java_method('java.lang.System', 'exit', 0)) AS t(a)", "java_method"),
        ("SELECT reflect('java.lang.System', 'exit', 0) FROM orders", "reflect"),
        ("SELECT * FROM parquet.`/etc`", "parquet"),
        ("CREATE TABLE created (a INT) USING parquet", "CreateDataSourceTable"),
        ("ADD JAR 'https://example.invalid/code.jar'", "AddJar"),
    ],
)
def test_question_of_a_hostile_planning_process_runs_nothing_in_the_driver(
    spark: SparkSession, sql: str, named: str
) -> None:
    relation = Relation(sql={"query": sql}).SerializeToString()
    for request in (AnalysisRequest(relation), AnalysisRequest(relation, {"orders": relation})):
        analysis = ANALYZER.analyze(request)
        assert named in analysis.error + analysis.unsupported
    assert not spark.catalog.tableExists("created")


SCALA = {"function_name": "f", "scalar_scala_udf": {"payload": b"\xac\xed\x00\x05"}}
JAVA = {"function_name": "f", "java_udf": {"class_name": "java.lang.Runtime"}}
TYPE_WITH_CLASS = {"literal": {"null": {}}}, {"udt": {"type": "udt", "jvm_class": "java.lang.Runtime"}}

TYPE_AS_TEXT = r'{"type":"struct","fields":[{"name":"a","type":{"type":"\u0075dt","class":"java.lang.Runtime"}}]}'


def selecting(expression: dict[str, Any]) -> Relation:
    return Relation(project={"input": {"range": {"end": 1, "step": 1}}, "expressions": [expression]})


@pytest.mark.parametrize(
    ("relation", "named"),
    [
        (
            Relation(read={"is_streaming": True, "data_source": {"format": "parquet", "paths": ["/etc"]}}),
            "relation read",
        ),
        (Relation(read={"data_source": {"format": "java.lang.Runtime"}}), "the format java.lang.Runtime"),
        (Relation(local_relation={"schema": TYPE_AS_TEXT}), "user-defined type"),
        (Relation(read={"data_source": {"format": "json", "schema": TYPE_AS_TEXT}}), "user-defined type"),
        (selecting({"common_inline_user_defined_function": SCALA}), "common_inline_user_defined_function"),
        (selecting({"common_inline_user_defined_function": JAVA}), "common_inline_user_defined_function"),
        (selecting({"cast": {"expr": TYPE_WITH_CLASS[0], "type": TYPE_WITH_CLASS[1]}}), "user-defined type"),
    ],
)
def test_plan_that_makes_spark_start_a_stream_or_load_classes_never_reaches_the_jvm(
    relation: Relation, named: str
) -> None:
    assert named in ANALYZER.analyze(AnalysisRequest(relation.SerializeToString())).unsupported


def test_question_that_sets_an_option_of_the_driver_or_is_malformed_is_refused() -> None:
    rows = Relation(range={"end": 1, "step": 1}).SerializeToString()
    catalog = {"spark.sql.catalog.taken": "org.apache.spark.sql.execution.datasources.v2.jdbc.JDBCTableCatalog"}
    assert "spark.sql.catalog.taken" in ANALYZER.analyze(AnalysisRequest(rows, configuration=catalog)).unsupported
    assert "not a Relation" in ANALYZER.analyze(AnalysisRequest(b"\xff")).unsupported
    java = CommonInlineUserDefinedFunction(function_name="f", java_udf=JAVA["java_udf"]).SerializeToString()
    for function, named in ((b"\xff", "not a Common"), (java, "only a submitted program can define Python functions")):
        assert named in ANALYZER.analyze(AnalysisRequest(rows, functions={"f": function})).unsupported
    with pytest.raises(DocumentError, match="malformed"):
        ANALYZER.answer("{")
    with pytest.raises(DocumentError, match="at once"):
        ANALYZER.answer(f"[{','.join(['{}'] * 51)}]")


@pytest.mark.parametrize(
    ("declaration", "named"),
    [
        ("DECLARE taken STRING DEFAULT reflect('java.lang.System', 'exit', 0)", "reflect"),
        ("CREATE TEMPORARY FUNCTION taken AS 'java.lang.Runtime'", "CREATE TEMPORARY FUNCTION taken"),
        ("CREATE TABLE declared (a INT) USING parquet", "CREATE TABLE declared"),
    ],
)
def test_declaration_that_runs_code_or_makes_a_table_is_refused(
    spark: SparkSession, declaration: str, named: str
) -> None:
    rows = Relation(range={"end": 1, "step": 1}).SerializeToString()
    analysis = ANALYZER.analyze(AnalysisRequest(rows, declarations=(declaration,)))
    assert named in analysis.error + analysis.unsupported
    assert not spark.catalog.tableExists("declared")


@pytest.mark.parametrize(
    ("statement", "instead"),
    [
        ("CREATE TABLE IF NOT EXISTS written (a INT) USING parquet", "only when it is submitted"),
        ("INSERT INTO written SELECT 1", "only when it is submitted"),
        ("CREATE TABLE written (a INT) USING org.example.Source", "name it by its short name"),
        ("INSERT OVERWRITE DIRECTORY '/no/directory' USING parquet SELECT 1", "run others in Spark"),
        ("USE shop", "name the database with the table"),
        ("SET VARIABLE least = (SELECT max(a) FROM read)", "reads no table"),
    ],
)
def test_statement_of_sql_that_a_program_cannot_run_is_refused_with_what_to_do_instead(
    statement: str, instead: str
) -> None:
    assert instead in ANALYZER.analyze(AnalysisRequest(statement=statement)).unsupported


def test_statement_that_fills_a_table_calls_no_java(spark: SparkSession) -> None:
    statement = "CREATE TABLE called USING parquet AS SELECT java_method('java.lang.Math', 'abs', -1)"
    analysis = ANALYZER.analyze(AnalysisRequest(statement=statement), StaticTables(writes=True))
    assert "UNRESOLVED_ROUTINE" in analysis.error
    assert not spark.catalog.tableExists("called")


@pytest.mark.parametrize("column", ["_metadata", "_metadata.file_name"])
def test_column_about_the_file_of_a_row_that_no_file_has_is_refused_with_a_way_out(column: str) -> None:
    source = Relation(read={"is_streaming": True, "data_source": {"format": "rate"}})
    attribute = {"unresolved_attribute": {"unparsed_identifier": column}}
    relation = Relation(project={"input": source, "expressions": [attribute]}).SerializeToString()
    assert "select its fields there" in ANALYZER.analyze(AnalysisRequest(relation)).unsupported


def test_text_of_sql_is_not_filled_in_with_the_environment_of_the_driver() -> None:
    """Spark replaces ``${env:NAME}`` in SQL, and its message for a column of that name would reach the program."""
    relation = Relation(sql={"query": "SELECT `${env:PATH}` FROM range(1)"}).SerializeToString()
    assert "${env:PATH}" in ANALYZER.analyze(AnalysisRequest(relation)).error
