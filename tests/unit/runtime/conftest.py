"""What holds for the tests of the engine's modules."""

from __future__ import annotations

from ckpt_runtime.storage.filesystem import allow_memory

allow_memory()
