"""The classes of Flink's own REST client read our answers: the examples of the OpenAPI document, which are real ones.

Needs a Flink distribution and a JDK, see ``tests/support/flink_cluster.py``.
"""

from __future__ import annotations

import subprocess
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from tests.support.flink_cluster import HOME, absent

pytestmark = [
    pytest.mark.flink,
    pytest.mark.slow,
    pytest.mark.row("io.1"),
    pytest.mark.skipif(bool(absent("java", "javac")), reason=absent("java", "javac")),
]

SOURCE = Path(__file__).parents[1] / "support" / "flink" / "ReadAnswers.java"
LEAST_ANSWERS = 70


@pytest.mark.timeout(300)
def test_flinks_client_classes_read_every_answer_of_a_flink_path(tmp_path: Path) -> None:
    libraries = f"{HOME}/lib/*"
    compiled = ["javac", "-nowarn", "-d", str(tmp_path), "-cp", libraries, str(SOURCE)]
    subprocess.run(compiled, check=True, timeout=120)
    (dist,) = (HOME / "lib").glob("flink-dist-*.jar")
    with as_file(files("ckpt_runtime.rest").joinpath("examples.json")) as examples:
        command = ["java", "-cp", f"{tmp_path}:{libraries}", SOURCE.stem, str(dist), str(examples)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=120)
    outcomes = [line.split("\t") for line in done.stdout.splitlines() if "\t" in line]
    assert [outcome for outcome in outcomes if outcome[0] != "read"] == []
    assert len(outcomes) >= LEAST_ANSWERS
