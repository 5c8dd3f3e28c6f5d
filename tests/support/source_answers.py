"""What Spark answers about programs that write the rows of a stream as they are: such programs need no Java machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256

import msgspec
from pyspark.sql.connect.proto import Relation

from ckpt_runtime.frontend.planning_process import PlanRequest, PlanResult
from ckpt_runtime.frontend.typed_plan import Analysis, AnalysisRequest, Source, TypedColumn

_TYPES = {"bigint": "long", "int": "integer", "string": "string"}
"""Names of types in SQL, and those in Spark's plans."""


def answers_to(needed: str) -> dict[str, str]:
    """Returns the answers to a list of requests, by their digests."""
    answers = {}
    for text in msgspec.json.decode(needed, type=list[msgspec.Raw]):
        relation = Relation.FromString(msgspec.json.decode(text, type=AnalysisRequest).relation)
        read = [column.alias for column in relation.project.expressions]
        columns = tuple(TypedColumn(column.name[0], _TYPES[column.expr.cast.type_str]) for column in read)
        analysis = Analysis(columns=columns, nodes=(Source(columns=columns, plan_id=relation.common.plan_id),))
        answers[sha256(bytes(text)).hexdigest()] = msgspec.json.encode(analysis).decode()
    return answers


def planned(request: PlanRequest, plan: Callable[[PlanRequest], PlanResult]) -> PlanResult:
    """Plans as a driver does: the program runs again when its request is answered."""
    result = plan(request)
    if result.needed:
        result = plan(replace(request, analyses=answers_to(result.needed)))
    return result
