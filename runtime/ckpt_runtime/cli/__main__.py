"""``python -m ckpt_runtime.cli``."""

from __future__ import annotations

from ckpt_runtime.cli.main import entry_point

if __name__ == "__main__":
    entry_point()
