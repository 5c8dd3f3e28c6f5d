"""DAGs for the common cases. A file in Airflow's DAG folder installs one with ``from airflow_provider_ckpt.dags import
ckpt_patch``.

The DAG ``ckpt_<name>`` is the global of that name in the module ``<name>`` of this package, which is imported at the
first access, so that a file loads only the DAGs that it installs.
"""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from airflow.sdk import DAG

_PREFIX = "ckpt_"


def names() -> list[str]:
    """The ids of all DAGs that can be imported from here."""
    return sorted(f"{_PREFIX}{module.name}" for module in pkgutil.iter_modules(__path__) if module.name[0] != "_")


__all__ = names()  # noqa: PLE0605 - with a star a file installs all of them


def __getattr__(name: str) -> DAG:
    if name not in names():
        raise AttributeError(f"module {__name__!r} has no DAG {name!r}, only {', '.join(names())}")
    found: DAG = getattr(import_module(f"{__name__}.{name.removeprefix(_PREFIX)}"), name)
    return found


def __dir__() -> list[str]:
    return names()
