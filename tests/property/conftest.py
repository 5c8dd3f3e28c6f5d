"""What holds for the properties."""

from __future__ import annotations

from ckpt_runtime.storage.filesystem import allow_memory

allow_memory()
