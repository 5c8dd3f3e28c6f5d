"""What a task's log may show of options and commands."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from airflow.sdk.log import mask_secret

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from ckpt_runtime.secret_keys import MASK, is_secret_key

_ASSIGNMENT = re.compile(r"([^\s=]+)=.*", re.DOTALL)


def hide(options: Mapping[str, str]) -> None:
    """From now on Airflow masks the values of keys that speak of a secret wherever this task logs or renders them."""
    for key, value in options.items():
        if value and is_secret_key(key):
            mask_secret(value)


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
