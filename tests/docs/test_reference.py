"""The generated reference is up to date, and leaves nothing unsaid."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_ckpt import exceptions
from airflow_provider_ckpt.get_provider_info import get_provider_info
from tests.differential.test_guide_forms import REFUSED, RUN
from tests.support.docstrings import all_parameters, docstring_of, meaning_of
from tests.support.metrics_page import render as render_metrics
from tests.support.patience import patient
from tests.support.reference_pages import classes_of, errors_of

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
_ENDINGS = {"operators": "Operator", "sensors": "Sensor", "triggers": "Trigger", "hooks": "Hook"}


def classes(*kinds: str) -> list[Any]:
    info = get_provider_info()
    return [cls for kind in kinds for cls in classes_of(info[kind][0]["python-modules"], _ENDINGS.get(kind, ""))]


def test_the_reference_is_up_to_date(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(ROOT / "runtime"), str(ROOT)))}
    command = [sys.executable, "-m", "tests.support.reference_pages", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True, timeout=patient(120))
    written = {page.name: page.read_text() for page in tmp_path.iterdir()}
    kept = {page.name: page.read_text() for page in REFERENCE.iterdir()}
    assert written.keys() == kept.keys()
    for name, text in written.items():
        assert kept[name] == text, f"{name} is out of date; run: make docs"


def test_page_of_metrics_is_the_one_made_from_the_table() -> None:
    kept = (ROOT / "docs" / "metrics.md").read_text()
    assert kept == render_metrics(), "docs/metrics.md is out of date; run: make docs"


def test_page_of_programs_states_how_many_forms_of_sparks_guide_run() -> None:
    page = (ROOT / "docs" / "pyspark.md").read_text()
    assert f"Of {len(RUN) + len(REFUSED)} forms of Spark's streaming guide, {len(RUN)} run unchanged" in page
    assert f"The other {len(REFUSED)} are refused" in page


@pytest.mark.parametrize("cls", classes("operators", "sensors", "triggers", "hooks"), ids=lambda cls: cls.__name__)
def test_every_parameter_is_explained(cls: Any) -> None:
    assert [name for name in all_parameters(cls) if not meaning_of(cls, name)] == []


@pytest.mark.parametrize("cls", classes("operators", "sensors"), ids=lambda cls: cls.__name__)
def test_every_task_says_what_it_returns_raises_and_renders(cls: Any) -> None:
    assert docstring_of(cls).returns
    errors = errors_of(cls)
    assert [name for name in errors if not hasattr(exceptions, name)] == []
    assert "CkptArgumentInvalid" in errors
    assert ("CkptUnavailable" in errors) == ("ckpt_conn_id" in all_parameters(cls))
    says = {name for name in all_parameters(cls) if "(templated)" in meaning_of(cls, name)}
    assert says == set(cls.template_fields) & all_parameters(cls).keys()


def test_docstring_with_a_line_after_its_parameters_is_refused() -> None:
    def wrong(name: str) -> None:
        """Does something.

        :param name: of it.
        And more.
        """

    with pytest.raises(ValueError, match="And more. comes behind|'And more.' comes behind"):
        docstring_of(wrong)
