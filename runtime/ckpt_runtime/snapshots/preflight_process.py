"""The process of a preflight: opens a program's operators with stored states that have descriptors but no rows.

An operator requests the same states as at a restore, and the same requests are refused. Operators with user code
request their states only when that code runs, which a preflight must not do: the verdict on their states is unknown.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pyarrow as pa
from msgspec import to_builtins

from ckpt_runtime.frontend.program import load_plan
from ckpt_runtime.graph.compiler import CompiledPlan
from ckpt_runtime.graph.key_groups import KeyGroupRange
from ckpt_runtime.graph.schema import decoded
from ckpt_runtime.graph.specs import AggregateSpec, DeduplicateSpec, GroupSpec, JoinSpec, ProcessSpec, TableSpec
from ckpt_runtime.operators.aggregate import AggregateOperator, DeduplicateOperator
from ckpt_runtime.operators.group_state import GroupStateOperator
from ckpt_runtime.operators.groups import GroupOperator
from ckpt_runtime.operators.join import JoinOperator
from ckpt_runtime.operators.operator import OperatorContext, OperatorStateStore, Output
from ckpt_runtime.operators.result_table import ResultTableOperator
from ckpt_runtime.processes.limited_process import serve
from ckpt_runtime.snapshots.preflight import UNTIL_IT_RUNS, PreflightAnswer, Question, StateVerdict
from ckpt_runtime.state.errors import StateError
from ckpt_runtime.state.memory.aggregate_table import AggregateTable
from ckpt_runtime.state.memory.backend import MemoryKeyedStateBackend
from ckpt_runtime.state.memory.pages import UnclaimedState
from ckpt_runtime.state.memory.row_buffer import RowBuffers, stored_schema
from ckpt_runtime.state.states import AggregateColumn, RowBufferSpec
from ckpt_runtime.state.stored_rows import schema_to_json


def verdicts(plan: CompiledPlan, stored: Mapping[str, Mapping[str, dict[str, Any]]]) -> Iterator[StateVerdict]:
    """The verdicts in the order of the plan, followed by the states of operators that are not in the plan."""
    for uid, spec in plan.specs.items():
        present = stored.get(uid, {})
        match spec:
            case AggregateSpec() if uid in plan.input_schemas:
                yield from _opened(AggregateOperator(spec, plan.input_schemas[uid]), uid, present)
            case JoinSpec():
                yield from _opened(JoinOperator(spec), uid, present)
            case GroupSpec():
                yield from _opened(GroupOperator(spec), uid, present)
            case TableSpec():
                yield from _opened(ResultTableOperator(spec), uid, present)
            case DeduplicateSpec():
                yield from _opened(DeduplicateOperator(spec), uid, present)
            case AggregateSpec() | ProcessSpec():
                for name, descriptor in present.items():
                    yield StateVerdict(uid, name, UNTIL_IT_RUNS, _fields(descriptor))
            case _:
                continue
    for uid in sorted(stored.keys() - plan.specs.keys()):
        for name, descriptor in stored[uid].items():
            yield StateVerdict(uid, name, "dropped", _fields(descriptor))


class _Asked(MemoryKeyedStateBackend):
    """A backend whose stored states have no rows. It records the schemas that the operator requests."""

    def __init__(self, uid: str, stored: Mapping[str, dict[str, Any]]) -> None:
        super().__init__(KeyGroupRange(0, 0), 1, uid)
        self._unclaimed = {name: UnclaimedState(uid, name, descriptor) for name, descriptor in stored.items()}
        self.wanted: dict[str, tuple[str, ...]] = {}

    def aggregate_table(self, name: str, key_schema: pa.Schema, columns: Sequence[AggregateColumn]) -> AggregateTable:
        self._note(name, AggregateTable(self.uid, name, key_schema, columns).stored_schema())
        return super().aggregate_table(name, key_schema, columns)

    def row_buffers(self, specs: Sequence[RowBufferSpec]) -> RowBuffers:
        for spec in specs:
            self._note(spec.name, stored_schema(spec))
        return super().row_buffers(specs)

    def _note(self, name: str, schema: pa.Schema) -> None:
        self.wanted[name] = tuple(schema_to_json(schema)["fields"])


class NoOutput(Output):
    """The output of an operator that gets no rows."""

    def emit(self, batch: pa.RecordBatch) -> None:
        raise AssertionError("no row came in")

    def emit_watermark(self, timestamp_ms: int) -> None:
        pass

    def emit_coming_watermark(self, timestamp_ms: int, batch: int) -> None:
        pass

    def emit_end_of_range(self) -> None:
        pass


def _opened(
    operator: AggregateOperator | JoinOperator | GroupStateOperator, uid: str, stored: Mapping[str, dict[str, Any]]
) -> Iterator[StateVerdict]:
    refused: str | None = None
    asked: _Asked | None = None
    try:
        asked = _Asked(uid, stored)
        store = OperatorStateStore()
        context = OperatorContext("", uid, uid, 0, 1, 0, store, lambda: 0, lambda: 0, lambda _: None, keyed_state=asked)
        operator.open(context, NoOutput())
    except StateError as error:
        refused = str(error)
    wanted = {} if asked is None else asked.wanted
    for name in dict.fromkeys((*stored, *wanted)):
        fields, new = _fields(stored.get(name, {})), wanted.get(name, ())
        if refused is not None and (repr(name) in refused or not wanted):
            yield StateVerdict(uid, name, "refused", fields, new, refused)
        elif name not in wanted:
            yield StateVerdict(uid, name, "unused", fields)
        elif name not in stored:
            yield StateVerdict(uid, name, "new", (), new)
        else:
            yield StateVerdict(uid, name, "matched" if fields == new else "changed", fields, new)


def _fields(descriptor: Mapping[str, Any]) -> tuple[str, ...]:
    schema = descriptor.get("schema")
    fields = schema.get("fields") if isinstance(schema, dict) else None
    return tuple(map(str, fields)) if isinstance(fields, list) else ()


def _answer(document: bytes) -> bytes:
    question = decoded(document, Question)
    order = question.plan
    if order.archive is not None:
        with ZipFile(order.archive) as files:
            files.extractall(order.archive_dir)
    plan = load_plan(
        Path(order.archive_dir), order.entry, order.args, order.configuration, order.defaults, analyses=order.analyses
    )
    return json.dumps(to_builtins(PreflightAnswer(tuple(verdicts(plan, question.stored))))).encode()


def main() -> None:
    """The process's entry point."""
    serve(_answer)


if __name__ == "__main__":
    main()
