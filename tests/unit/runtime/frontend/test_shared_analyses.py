"""Answers of Spark that the processes of a test run share: asked once, and asked again if a file is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Thread

import pytest

from ckpt_runtime.frontend.analysis import Analyzer
from ckpt_runtime.frontend.catalog_tables import StaticTables
from ckpt_runtime.frontend.typed_plan import Analysis, AnalysisRequest, StaticTable, TableRequest, TypedColumn
from tests.support import analyses

ANSWER = Analysis(columns=(TypedColumn("n", "long"),))


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[AnalysisRequest]:
    """The requests that reach Spark, whose answer is ``ANSWER``, or an error for a text in DDL."""
    requests: list[AnalysisRequest] = []

    def ask(_analyzer: Analyzer, request: AnalysisRequest, _tables: object = None) -> Analysis:
        requests.append(request)
        if request.views:
            return Analysis(nodes=(StaticTable(columns=()),))
        return Analysis(error="no such type") if request.ddl else ANSWER

    monkeypatch.setattr(analyses, "_ask", ask)
    monkeypatch.setattr(Analyzer, "analyze", Analyzer.analyze)
    monkeypatch.setenv(analyses.VARIABLE, "")
    analyses.share(tmp_path)
    return requests


def test_the_same_question_reaches_spark_once(asked: list[AnalysisRequest], tmp_path: Path) -> None:
    one, other = AnalysisRequest(b"one"), AnalysisRequest(b"one", configuration={"spark.sql.ansi.enabled": "false"})
    assert [Analyzer().analyze(request) for request in (one, other, one, other)] == [ANSWER] * 4
    assert asked == [one, other]
    assert all(json.loads(file.read_text()) for file in tmp_path.iterdir())


def test_a_damaged_file_is_ignored_and_replaced(asked: list[AnalysisRequest], tmp_path: Path) -> None:
    Analyzer().analyze(AnalysisRequest(b"one"))
    (file,) = tmp_path.iterdir()
    for content in ("", '{"columns": 3}', "\x80"):
        file.write_text(content)
        assert Analyzer().analyze(AnalysisRequest(b"one")) == ANSWER
    assert len(asked) == 4


@pytest.mark.parametrize(
    "request_",
    [
        AnalysisRequest(ddl="n NONSENSE"),
        AnalysisRequest(views={"rows": b""}),
        AnalysisRequest(table=TableRequest("orders")),
    ],
)
def test_answers_that_depend_on_more_than_the_question_are_not_kept(
    asked: list[AnalysisRequest], request_: AnalysisRequest, tmp_path: Path
) -> None:
    for _ in range(2):
        Analyzer().analyze(request_)
    assert len(asked) == 2
    assert not list(tmp_path.iterdir())


def test_a_process_without_spark_gets_the_answer_of_the_shared_spark_and_its_tables(
    asked: list[AnalysisRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[tuple[AnalysisRequest, int, dict[str, int]]] = []

    def ask(_analyzer: Analyzer, request: AnalysisRequest, tables: StaticTables) -> Analysis:
        received.append((request, tables.size_bytes, dict(tables._sizes)))
        tables.files["digest"], tables._sizes["digest"] = b"\x00rows", 5
        return Analysis(error="the rest is too large")

    request, tables = AnalysisRequest(b"one", with_rows=True), StaticTables(100, _sizes={"earlier": 60})
    with analyses.SharedSpark(tmp_path, Analyzer()) as server, monkeypatch.context() as patch:
        patch.setattr(analyses, "_ask", ask)
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        assert Analyzer().analyze(request, tables).error == "the rest is too large"
        server.shutdown()
        thread.join()
    assert received == [(request, 100, {"earlier": 60})]
    assert tables.files == {"digest": b"\x00rows"}
    assert tables._sizes == {"earlier": 60, "digest": 5}
    Analyzer().analyze(request, tables)
    assert asked == [request]  # the shared one has ended


def test_questions_about_tables_of_the_catalog_stay_in_the_process(
    asked: list[AnalysisRequest], tmp_path: Path
) -> None:
    request = AnalysisRequest(table=TableRequest("orders"))
    with analyses.SharedSpark(tmp_path, Analyzer()):
        Analyzer().analyze(request)
    assert asked == [request]
