"""Spark's answers that planning a program again does not ask for."""

from __future__ import annotations

import msgspec
import pytest

from ckpt_runtime.frontend.typed_plan import Analysis, CatalogTable, StaticTable, TypedColumn
from ckpt_runtime.jobmaster.planning import MOST_REMEMBERED, MOST_REMEMBERED_CHARACTERS, RememberedAnswers
from tests.support.analyses import OWN_ANSWERS

COLUMNS = (TypedColumn("country", "string"),)


def text(analysis: Analysis) -> str:
    return msgspec.json.encode(analysis).decode()


LASTING = text(Analysis(columns=COLUMNS))


@pytest.fixture(autouse=True)
def own_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The drivers of a test run share their answers."""
    for name, method in OWN_ANSWERS.items():
        monkeypatch.setattr(RememberedAnswers, name, method)


def test_answers_are_those_of_one_program_and_entry() -> None:
    answers = RememberedAnswers()
    answers.keep("program", "job:pipeline", {"a": LASTING})
    answers.keep("program", "job:other", {"b": LASTING})
    assert answers.of("program", "job:pipeline") == {"a": LASTING}
    assert answers.of("program", "job:other") == {"b": LASTING}
    assert answers.of("another", "job:pipeline") == {}


def test_answers_that_may_change_are_not_remembered() -> None:
    answers = RememberedAnswers()
    changing = {
        "an error": text(Analysis(error="no such column")),
        "a refusal": text(Analysis(unsupported="an interval")),
        "a table of the catalog": text(Analysis(table=CatalogTable("t", "parquet", "file:/t", "{}"))),
        "rows": text(Analysis(nodes=(StaticTable(columns=COLUMNS),))),
    }
    answers.keep("program", "job:pipeline", {**changing, "types": LASTING})
    assert answers.of("program", "job:pipeline") == {"types": LASTING}


def test_programs_that_were_planned_last_are_remembered_unless_their_answers_are_too_large() -> None:
    answers = RememberedAnswers()
    for number in range(MOST_REMEMBERED + 1):
        answers.keep(str(number), "job:pipeline", {"a": LASTING})
    assert answers.of("0", "job:pipeline") == {}
    answers.keep("1", "job:pipeline", {"a": LASTING})
    answers.keep("large", "job:pipeline", {"a": text(Analysis(places={"f": "x" * MOST_REMEMBERED_CHARACTERS}))})
    assert answers.of("large", "job:pipeline") == answers.of("2", "job:pipeline") == {}
    assert answers.of("1", "job:pipeline") == {"a": LASTING}
