"""Packing pipelines for upload."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from ckpt_runtime.client import packaging
from ckpt_runtime.client.packaging import PackagingError, pack_pipeline


def tree(root: Path) -> Path:
    for name in ("job.py", "pkg/__init__.py", "pkg/data.csv", ".git/config", "pkg/__pycache__/x.pyc", ".env"):
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(name)
    return root


def test_a_directory_becomes_the_same_zip_each_time(tmp_path: Path) -> None:
    first = pack_pipeline(tree(tmp_path / "a" / "wordcount"))
    second = pack_pipeline(tree(tmp_path / "b" / "wordcount"))
    os.utime(tmp_path / "b" / "wordcount" / "job.py", (1, 1))
    assert first == second == pack_pipeline(tmp_path / "b" / "wordcount")
    name, content = first
    assert name == "wordcount.zip"
    assert zipfile.ZipFile(io.BytesIO(content)).namelist() == ["job.py", "pkg/__init__.py", "pkg/data.csv"]


def test_path_that_is_not_a_pipeline_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.txt").write_text("x")
    for path in (tmp_path / "nosuch.py", tmp_path / "a.txt", tmp_path, Path("/dev/null")):
        with pytest.raises(PackagingError, match=str(path)):
            pack_pipeline(path)
    (tmp_path / "b.py").write_text("x" * 100)
    monkeypatch.setattr(packaging, "MAX_ARCHIVE_BYTES", 50)
    for path in (tmp_path, tmp_path / "b.py"):
        with pytest.raises(PackagingError, match="50 bytes"):
            pack_pipeline(path)


def test_links_do_not_lead_outside(tmp_path: Path) -> None:
    (tmp_path / "secret.txt").write_text("x")
    root = tmp_path / "p"
    root.mkdir()
    (root / "job.py").write_text("x")
    (root / "link.txt").symlink_to(tmp_path / "secret.txt")
    with pytest.raises(PackagingError, match="outside"):
        pack_pipeline(root)
