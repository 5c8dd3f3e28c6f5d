"""Arguments of operators and sensors: their types, and their checks after templates were rendered.

A property of an operator, such as ``submit.job_id``, is an output of one task. Airflow expands a task over whole
results only; so the arguments that name a job, a savepoint or a checkpoint also take the result that has it. Raises
``CkptArgumentInvalid``. Also here: the parts of options and commands that a task's log may show, and the defaults from
section ``[ckpt]`` of Airflow's configuration, which are read when a task is constructed or a trigger runs, never at
import.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final, TypeAlias, TypeVar

from airflow.sdk import XComArg
from airflow.sdk.configuration import conf
from airflow.sdk.log import mask_secret

from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from ckpt_runtime.secret_keys import MASK, is_secret_key

T = TypeVar("T")

Templated: TypeAlias = T | XComArg
"""An argument that is a template field: a value, a template that renders to one, or another task's output."""

Duration = float | str | timedelta
"""A number of seconds, as everywhere in Airflow; a text with a unit such as ``"90 s"`` or ``"250 ms"``, or with none,
which is what a template makes of a number and means seconds as well; or a timedelta."""

_HEX_ID: Final = re.compile(r"[0-9a-fA-F]{32}")
_HEX_DIGITS: Final = 32
_IDS_AS_NUMBERS: Final = range(10 ** (_HEX_DIGITS - 1), 10**_HEX_DIGITS)
_DURATION: Final = re.compile(r"\s*(\d{1,15}(?:\.\d{1,9})?)\s*([a-zA-Z]*)\s*")
_LONGEST_MILLIS: Final = timedelta.max / timedelta(milliseconds=1)
_UNIT_MILLIS: Final[Mapping[str, int]] = {
    **dict.fromkeys(("ms", "milli", "millis", "millisecond", "milliseconds"), 1),
    **dict.fromkeys(("", "s", "sec", "secs", "second", "seconds"), 1000),
    **dict.fromkeys(("m", "min", "mins", "minute", "minutes"), 60_000),
    **dict.fromkeys(("h", "hour", "hours"), 3_600_000),
    **dict.fromkeys(("d", "day", "days"), 86_400_000),
}
_SHORTEST_PAUSE_MILLIS: Final = 10
_DURATION_FORMS: Final = "a number of seconds, a text like '90 s', '5 min' or '250 ms', or a timedelta"
_ASSIGNMENT: Final = re.compile(r"([^\s=]+)=(.*)", re.DOTALL)
_PASSWORD_IN_URL: Final = re.compile(r"://[^/@\s:]*:([^/@\s]+)@")
_TRUE: Final = ("true", "1", "yes", "on")
_FALSE: Final = ("false", "0", "no", "off")


def or_field(name: str, value: object, *fields: str) -> object:
    """The value; of another task's whole result, which is what Airflow expands over, the first of ``fields``."""
    if not isinstance(value, Mapping):
        return value
    given = {field: value[field] for field in fields if field in value}
    found = next((item for item in given.values() if item not in (None, "None")), None)
    if found is None:
        allowed = f"a task's result must have {' or '.join(fields)}"
        if not given:
            raise CkptArgumentInvalid(name, value, allowed)
        raise CkptArgumentInvalid(f"{name}[{next(iter(given))!r}]", None, allowed)
    return found


def job(value: object, name: str = "job") -> str:
    """A job: its id in lower case, its name, or a task's result that has an id."""
    given = or_field(name, value, "job_id")
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        # A native template turns digits alone into a number: an id has 32 of them, and a number has no leading zeros.
        given = f"{given:0{_HEX_DIGITS}d}" if given == 0 or given in _IDS_AS_NUMBERS else str(given)
    if not isinstance(given, str) or not given.strip() or given.strip() == "None":
        raise CkptArgumentInvalid(name, value, "it must be a job's id (32 hexadecimal digits) or its name")
    found = given.strip()
    return found.lower() if _HEX_ID.fullmatch(found) else found


def is_job_id(job: str) -> bool:
    """Whether it is a job's id, as :func:`job` gives it, and not a name."""
    return _HEX_ID.fullmatch(job) is not None and job == job.lower()


def millis(name: str, value: object, *, minimum: int = 1) -> int:
    """A :data:`Duration` in milliseconds."""
    found = _millis(value)
    if found is None or found < minimum:
        raise CkptArgumentInvalid(name, value, f"it must be a duration of at least {minimum} ms: {_DURATION_FORMS}")
    return round(found)


def seconds(name: str, value: object) -> float:
    """A :data:`Duration` in seconds, 0 allowed."""
    found = _millis(value)
    if found is None:
        raise CkptArgumentInvalid(name, value, f"it must be a duration: {_DURATION_FORMS}")
    return found / 1000


def optional_seconds(name: str, value: object) -> float | None:
    """A :data:`Duration` in seconds, or ``None`` when none is given, also by a template that renders to nothing."""
    given = optional_text(name, value) if isinstance(value, str) else value
    return None if given is None else seconds(name, given)


def pause(name: str, value: object) -> float:
    """A :data:`Duration` between two polls in seconds: long enough to avoid a busy loop."""
    return millis(name, value, minimum=_SHORTEST_PAUSE_MILLIS) / 1000


def _millis(value: object) -> float | None:
    """``None`` for a value that is not a duration, or is negative, or is longer than any ``timedelta``."""
    found = _any_millis(value)
    return found if found is not None and 0 <= found <= _LONGEST_MILLIS else None


def _any_millis(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, str):
        match = _DURATION.fullmatch(value)
        unit = None if match is None else _UNIT_MILLIS.get(match[2].lower())
        return None if match is None or unit is None else float(match[1]) * unit
    if isinstance(value, timedelta):
        value = value.total_seconds()
    return value * 1000 if isinstance(value, (int, float)) else None


def integer(name: str, value: object, *, minimum: int) -> int:
    """An integer, also as the text that a template renders to."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d+\s*", value):
        value = int(value.strip())
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise CkptArgumentInvalid(name, value, f"it must be an integer of at least {minimum}")
    return value


def boolean(name: str, value: object) -> bool:
    """A boolean, also as the text that a template renders to."""
    if isinstance(value, bool):
        return value
    text = str(value).strip().lower()
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    raise CkptArgumentInvalid(name, value, "it must be true or false")


def flag(name: str, value: object) -> bool:
    """A boolean that is not a template field: a template, or another task's output, would always be true."""
    if not isinstance(value, bool):
        raise CkptArgumentInvalid(name, value, "it must be True or False, and cannot be a template")
    return value


def choices(name: str, value: object, allowed: Sequence[str]) -> list[str]:
    """One or several of ``allowed``, given as one or as a list of them."""
    wanted = [value] if isinstance(value, str) else value
    if not isinstance(wanted, Collection) or isinstance(wanted, Mapping) or not wanted:
        raise CkptArgumentInvalid(name, value, f"it must be one or several of {', '.join(allowed)}")
    return [choice(name, item, allowed) for item in wanted]


def choice(name: str, value: object, allowed: Sequence[str]) -> str:
    """One of ``allowed`` (upper case), given in any case."""
    found = value.strip().upper() if isinstance(value, str) else value
    if found not in allowed:
        raise CkptArgumentInvalid(name, value, f"it must be one of {', '.join(allowed)}")
    return str(found)


def text(name: str, value: object) -> str:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise CkptArgumentInvalid(name, value, "it must be a non-empty string")
    return value.strip()


def optional_text(name: str, value: object) -> str | None:
    """A text; ``None``, the empty text and the text that a template makes of ``None`` mean "not given"."""
    if value is None or (isinstance(value, str) and value.strip() in ("", "None")):
        return None
    return text(name, value)


def options(name: str, value: object) -> dict[str, str]:
    """Configuration options: keys to texts; numbers and booleans become their text, timedeltas milliseconds."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise CkptArgumentInvalid(name, type(value).__name__, "it must be a mapping of option keys to values")
    return {str(key): _option(f"{name}[{key!r}]", item) for key, item in value.items()}


def _option(name: str, value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, timedelta):
        return f"{millis(name, value, minimum=0)} ms"
    if isinstance(value, (str, int, float)):
        return str(value)
    shown = type(value).__name__  # the value itself may hold a secret
    raise CkptArgumentInvalid(name, shown, "it must be a string, a number, a boolean or a timedelta")


def epoch_millis(name: str, value: object) -> int:
    """A moment in milliseconds since the epoch: such a number, a datetime with a zone, or ISO 8601 text with one."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    moment = value
    if isinstance(value, str):
        if value.strip().isdigit():
            return int(value)
        try:
            moment = datetime.fromisoformat(value.strip())
        except ValueError:
            moment = None
    if not isinstance(moment, datetime) or moment.tzinfo is None:
        allowed = "it must be milliseconds since the epoch, or a date and time with a time zone"
        raise CkptArgumentInvalid(name, value, allowed)
    return round(moment.timestamp() * 1000)


# --- secrets


def hide(rendered: object) -> None:
    """Have Airflow mask the secrets of an argument wherever this task logs or shows it from now on.

    Secrets are values of keys that name a secret, in a mapping or as ``key=value``, and passwords of URLs.
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
    """The command without the value of any ``key=value``: only the user knows which option holds a secret."""
    return " ".join(_ASSIGNMENT.sub(rf"\1={MASK}", part) for part in command)


def refuse_secrets(options: Mapping[str, str]) -> None:
    """Check the argument ``configuration``, whose options a task records, where Airflow's users can read them.

    :raises CkptArgumentInvalid: naming a key that names a secret.
    """
    secret = next((key for key in options if is_secret_key(key)), None)
    if secret is not None:
        allowed = "a secret is not recorded: set it in the session, or when the job is first submitted"
        raise CkptArgumentInvalid("configuration", secret, allowed)


_SECTION = "ckpt"
DEFAULT_DEFERRABLE = "AIRFLOW__OPERATORS__DEFAULT_DEFERRABLE"


def deferrable() -> bool:
    """Whether tasks wait in the triggerer: ``[ckpt] deferrable``, else Airflow's variable for all operators, else true.

    These waits are long and hold no worker then. The variable counts, and ``[operators] default_deferrable`` in
    airflow.cfg does not, because Airflow itself writes ``false`` there when it makes the file.
    """
    if conf.has_option(_SECTION, "deferrable"):
        return bool(conf.getboolean(_SECTION, "deferrable"))
    return DEFAULT_DEFERRABLE not in os.environ or bool(conf.getboolean("operators", "default_deferrable"))


_DEFAULT_SECONDS: Final = {
    "poll_interval": 2.0,
    "defer_after": 3.0,
    "min_deferral": 6.0,
    "wait_timeout": 600.0,
    "request_retry_timeout": 180.0,
}


def configured_seconds(name: str) -> float:
    """An option of the section ``[ckpt]``, in seconds; ``get_provider_info`` describes them."""
    return float(conf.getfloat(_SECTION, name, fallback=_DEFAULT_SECONDS[name]))
