"""Packing pipelines for upload."""

from __future__ import annotations

import io
import os
import zipfile
from pathlib import Path

import pytest

from ckpt_runtime.client import packaging
from ckpt_runtime.client.packaging import PackagingError, pack_pipeline, pack_script


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


def test_script_is_packed_with_the_modules_beside_it_that_it_and_these_import(tmp_path: Path) -> None:
    texts = {
        "my-job.py": "import json, pkg.inner\ndef main():\n    from helper import one",
        "helper.py": "import other\nimport helper",
        "other.py": "not python(",
        "unused.py": "",
        "json/rows.csv": "a",
        "pkg/__init__.py": "from . import inner",
        "pkg/inner.py": "import third",
        "pkg/limits.csv": "1",
        "third.py": "",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    module, content = pack_script(tmp_path / "my-job.py")
    packed = zipfile.ZipFile(io.BytesIO(content))
    assert module == "my_job"
    assert packed.read("my_job.py").decode() == texts["my-job.py"]
    wanted = ["helper.py", "my_job.py", "other.py", "pkg/__init__.py", "pkg/inner.py", "pkg/limits.csv", "third.py"]
    assert packed.namelist() == wanted
    assert pack_script(tmp_path / "helper.py")[0] == "helper"
    assert pack_pipeline(tmp_path / "my-job.py") == ("my_job.zip", content)
    assert pack_pipeline(tmp_path / "other.py") == ("other.py", b"not python(")
    (tmp_path / "third.py").write_text("import my_job")
    (tmp_path / "my_job.py").write_text("")
    with pytest.raises(PackagingError, match=r"my-job.py: it imports my_job.py, which has the name of its own module"):
        pack_pipeline(tmp_path / "my-job.py")


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
