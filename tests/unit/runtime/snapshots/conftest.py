"""What holds for the tests of snapshots."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests in each file system run in an object store with ``make test-long`` only: requests there take most of their
    time. In the suite the tests of ``storage/`` and of the tools in ``tests/integration/test_object_store.py`` do."""
    for item in items:
        case = getattr(item, "callspec", None)
        if case is not None and case.params.get("base") == "s3" and item.path.is_relative_to(FOLDER):
            item.add_marker(pytest.mark.long)
