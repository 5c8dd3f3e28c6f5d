"""The structs of the REST contract about the savepoint catalogue."""

from __future__ import annotations

from ckpt_runtime.contract.checkpoints import Savepoint, SavepointMark

__all__ = ["Savepoint", "SavepointMark"]
