"""What a task's log shows of options."""

from __future__ import annotations

import pytest

from airflow_provider_ckpt import arguments, secret_values
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid


def test_a_command_is_shown_without_the_values_of_its_options() -> None:
    command = [
        "spark-submit",
        "--conf",
        "spark.a=hush",
        "-D",
        "my.db.password=hush=hush\nhush",
        "main.py",
        "--port",
        "1",
    ]
    assert secret_values.shown_command(command) == (
        "spark-submit --conf spark.a=****** -D my.db.password=****** main.py --port 1"
    )


def test_airflow_is_told_which_values_are_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    monkeypatch.setattr(secret_values, "mask_secret", told.append)
    secret_values.hide({"my.db.password": "hush", "parallelism.default": "2", "x.token": ""})
    assert told == ["hush"]


@pytest.mark.parametrize("given", [{"my.password": ["hush"]}, "my.password=hush", [("my.password", "hush")]])
def test_options_of_a_wrong_type_are_refused_without_their_value(given: object) -> None:
    with pytest.raises(CkptArgumentInvalid) as caught:
        arguments.options("configuration", given)
    assert "hush" not in str(caught.value)
