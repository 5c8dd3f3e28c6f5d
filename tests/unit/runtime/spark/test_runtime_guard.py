"""The guard against an installation without the extra that sessions need."""

from __future__ import annotations

import importlib.util
from importlib.machinery import ModuleSpec

import pytest

from ckpt_runtime.spark.installation import RuntimeNotInstalledError, check_runtime


def test_an_installation_with_the_extra_passes() -> None:
    check_runtime()


def test_missing_package_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec

    def find_spec(name: str) -> ModuleSpec | None:
        return None if name in ("numba", "uvicorn") else found(name)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    with pytest.raises(RuntimeNotInstalledError, match=r"needs numba, uvicorn.*pip install 'ckpt-runtime\[sess"):
        check_runtime()
