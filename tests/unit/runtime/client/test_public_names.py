"""What a script imports from the client's package stays there."""

from __future__ import annotations

import ckpt_runtime.client as package
from ckpt_runtime.client import CkptClient, CkptClientError
from ckpt_runtime.client.clients import CkptClient as Client


def test_the_names_of_the_package_are_those_of_its_modules() -> None:
    assert CkptClient is Client
    assert all(getattr(package, name).__module__.startswith(f"{package.__name__}.") for name in package.__all__)
    assert issubclass(package.NotFound, CkptClientError)
