"""DAG files that a test writes and changes, in a bundle beside the one with the tests' own DAGs."""

from __future__ import annotations

from pathlib import Path
from string import Template

from demo.airflow_instance import LocalAirflow
from tests.system.airflow_instance import WRITTEN_DAGS, until


def write_dag(airflow: LocalAirflow, dag_id: str, template: str, **values: object) -> Path:
    """Write or replace the file of a DAG, and wait until Airflow has read it.

    ``$name`` in the template stands for a value, ``$dag_id`` and ``$description`` for the DAG's own: Airflow shows the
    description, which is another one for each content.
    """
    description = f"content {hash((template, *values.items())):x}"
    path = airflow.home / WRITTEN_DAGS / f"{dag_id}.py"
    path.write_text(Template(template).substitute(values, dag_id=dag_id, description=description))

    def is_read() -> bool:
        errors = [text for text in airflow.api.import_errors() if path.name in text]
        assert not errors, errors[0]
        if not airflow.api.has_dag(dag_id):
            return False
        return bool(airflow.api.call("GET", f"/dags/{dag_id}/details")["description"] == description)

    if airflow.api.has_dag(dag_id):
        airflow.api.parse_again(dag_id)
    until(is_read, f"the reading of {path.name}")
    return path
