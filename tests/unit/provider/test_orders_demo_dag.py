"""The DAG ``orders_demo`` of the demonstration."""

from __future__ import annotations

import json
from importlib import import_module

from airflow.serialization.serialized_objects import DagSerialization

from demo.__main__ import CLOSING_STEP, STEPS


def test_steps_of_the_dag_are_those_that_the_demonstration_reports() -> None:
    dag = import_module("demo.dags.orders_demo").orders_demo
    steps = [task.task_id for task in dag.topological_sort()]
    assert [step for step in steps if step != "cancel_leftovers"] == list(STEPS)
    assert CLOSING_STEP in STEPS
    document = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    assert DagSerialization.from_dict(document).dag_id == "orders_demo"
