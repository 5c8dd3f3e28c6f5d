"""What a task's log may show of options and commands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from airflow.sdk.log import mask_secret

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from ckpt_runtime.secret_keys import MASK, is_secret_key

_ASSIGNMENT = re.compile(r"([^\s=]+)=(.*)", re.DOTALL)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s:]*:([^/@\s]+)@")


def hide(rendered: object) -> None:
    """From now on Airflow masks the secrets of an argument wherever this task logs or shows it.

    Those are values of keys that speak of a secret, in a mapping or as ``key=value``, and passwords of URLs.
    """
    if isinstance(rendered, Mapping):
        for key, value in rendered.items():
            if isinstance(value, str):
                _hide_value(str(key), value)
    elif isinstance(rendered, str):
        assigned = _ASSIGNMENT.fullmatch(rendered)
        _hide_value(*(assigned.groups() if assigned else ("", rendered)))


def _hide_value(key: str, value: str) -> None:
    if value and is_secret_key(key):
        mask_secret(value)
    for password in _PASSWORD_IN_URL.findall(value):
        mask_secret(password)


def shown_command(command: Sequence[str]) -> str:
    """The command without the value of any ``key=value``: which option holds a secret is for its user to know."""
    return " ".join(_ASSIGNMENT.sub(rf"\1={MASK}", part) for part in command)


def refuse(name: str, options: Mapping[str, str]) -> None:
    """For options that a task writes down, where Airflow's users can read them.

    :raises CkptArgumentInvalid: naming a key that speaks of a secret.
    """
    secret = next((key for key in options if is_secret_key(key)), None)
    if secret is not None:
        allowed = "a secret is not written down: give it to the session, or when the job is submitted first"
        raise CkptArgumentInvalid(name, secret, allowed)
