"""The manifests of deploy/kubernetes, and the command of the driver in them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parents[2] / "deploy" / "kubernetes"
Json = dict[str, Any]


def documents() -> list[Json]:
    """What Kubernetes gets: everything that the kustomization names, and the pod that Spark makes executors of."""
    kustomization = yaml.safe_load((FOLDER / "kustomization.yaml").read_text())
    (template,) = kustomization["configMapGenerator"]
    files = [*kustomization["resources"], *template["files"]]
    return [document for file in files for document in yaml.safe_load_all((FOLDER / file).read_text())]


def document(kind: str) -> Json:
    """The only one of its kind."""
    (found,) = [document for document in documents() if document["kind"] == kind]
    return found


def driver() -> Json:
    """The container of the driver."""
    (container,) = document("Deployment")["spec"]["template"]["spec"]["containers"]
    found: Json = container
    return found


def command(environment: Mapping[str, str]) -> list[str]:
    """The driver's command with the variables put in, as Kubernetes does it."""
    return [re.sub(r"\$\((\w+)\)", lambda name: environment[name[1]], argument) for argument in driver()["args"]]
