"""Kernels: warm-up covers every form that is used, and the cache directory may be missing."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from ckpt_runtime.state import columns
from ckpt_runtime.state.kernels import compiler

SCRIPT = """
import logging, sys
logging.basicConfig(level=logging.WARNING, stream=sys.stdout)
import numpy as np
from ckpt_runtime.state.arrays import read_only
from ckpt_runtime.state.kernels import compiler

@compiler.kernel((compiler.IN_I64,))
def total(numbers):
    found = 0
    for number in numbers:
        found += number
    return found

print(total(read_only(np.arange(5))))
"""
"""A kernel of its own: compiling those of the engine takes several seconds."""


def run(cache: str, home: Path) -> str:
    script = home / "script.py"
    script.write_text(SCRIPT)
    environment = {"CKPT_KERNEL_CACHE_DIR": cache, "HOME": str(home), "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_kernel_cache_is_in_a_versioned_folder(tmp_path: Path) -> None:
    assert run(str(tmp_path / "cache"), tmp_path).strip() == "10"
    folders = list((tmp_path / "cache").iterdir())
    assert len(folders) == 1
    assert folders[0].name.startswith("numba")
    assert list(folders[0].rglob("*.nbi"))


def test_unwritable_cache_means_compiling_in_memory_with_a_line(tmp_path: Path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("not a directory")
    lines = run(str(blocker / "cache"), tmp_path).splitlines()
    assert lines[-1] == "10"
    assert "kernel cache is not writable" in lines[0]


def test_empty_setting_switches_the_cache_off(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(compiler.CACHE_DIRECTORY_VARIABLE, "")
    with caplog.at_level(logging.WARNING):
        assert compiler.cache_directory.__wrapped__() is None
    assert not caplog.records


@pytest.fixture(scope="session")
def warm() -> None:
    compiler.warm_up()


def test_every_kernel_is_compiled_by_warm_up_and_releases_the_lock(warm: None) -> None:
    for dispatcher, signatures in compiler.registered_kernels():
        assert len(dispatcher.signatures) >= len(signatures)
        assert dispatcher.targetoptions["nogil"]


def test_columns_over_writable_memory_are_inputs_of_the_declared_form() -> None:
    """Otherwise numba would compile the kernels that read them while a stream is running."""
    missing = columns.bitmap_of(np.array([1, 0], np.uint8))
    text = columns.bytes_array(pa.string(), np.array([0, 1, 3]), np.array([97, 98, 99], np.uint8))
    numbers = columns.arrow_from_numpy(pa.int64(), np.array([1, 2]), missing)
    wide = pa.Array.from_buffers(pa.binary(2), 2, [missing, pa.py_buffer(bytearray(b"abcd"))])
    views = columns.bytes_column(text), columns.fixed_bytes_column(wide, 2), columns.int64_column(numbers)
    for view in views:
        parts = [getattr(view, field.name) for field in fields(view)]
        assert not [part for part in parts if isinstance(part, np.ndarray) and part.flags.writeable]
