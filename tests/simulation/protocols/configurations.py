"""Configurations of a simulated job: what each means, how they are stored, and what a new driver makes of that.

An option ``number`` stands for settings of checkpoints and a restart strategy; others come and go beside it. Documents
are those of production, half of them in the form that earlier versions stored.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from ckpt_runtime.checkpoint.configuration import CheckpointConfiguration
from ckpt_runtime.configuration.configuration import ChangeNote, Configuration, OwnConfiguration
from ckpt_runtime.jobmaster.job_record import cluster_options
from ckpt_runtime.storage.job_store import StoredJob
from tests.simulation.protocols.scenario import Scenario
from tests.simulation.schedules.violation import Violation

_CLUSTER = {"of.cluster": "c", "of.both": "c"}
_INTERNAL = {"$internal.kept": "k"}


@dataclass(frozen=True, slots=True)
class Meaning:
    """Of one configuration. ``strategy`` is a name of ``STRATEGIES``."""

    settings: CheckpointConfiguration
    strategy: str


class Options:
    """All configurations that were ever asked for; those that were stored, by version."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self._meanings = [Meaning(scenario.submitted, scenario.strategy)]
        self._stored = {1: Configuration({"number": "0", "of.job": "j", "of.both": "j"})}
        self._is_old_form = seed % 2 == 0
        # What the cluster said of an option that the job gave as well, earlier versions did not store.
        self._cluster = {"of.cluster": "c"} if self._is_old_form else _CLUSTER

    def submitted(self) -> StoredJob:
        given = self._stored[1].to_dict()
        properties = {"cluster_configuration": {**_CLUSTER, **given}} if self._is_old_form else {"defaults": _CLUSTER}
        return StoredJob("0" * 32, {}, {**given, **_INTERNAL}, properties=properties)

    def other(self, own: OwnConfiguration, meaning: Meaning, rng: Random) -> OwnConfiguration:
        """The next version, which means that."""
        given = {"number": str(len(self._meanings))}
        self._meanings.append(meaning)
        given |= {key: "j" for key in ("of.job", "of.both") if rng.random() < 0.5}
        return own.changed(Configuration(given), ChangeNote(own.version + 1, 0, "user", ()))

    def meaning(self, given: Configuration) -> Meaning:
        return self._meanings[int(given["number"])]

    def effective(self, given: Configuration) -> Configuration:
        """Over the cluster's, as the driver that accepted it has it."""
        return Configuration.merge(Configuration(self._cluster), given)

    def stored(self, before: StoredJob, own: OwnConfiguration) -> None:
        """A version is one configuration for ever, and the next one after that which is stored."""
        known = self._stored.setdefault(own.version, own.given)
        if known != own.given:
            raise Violation(f"configuration: version {own.version} is {known} and {own.given}")
        if own.version not in (before.version, before.version + 1):
            raise Violation(f"configuration: version {own.version} is stored after {before.version}")

    def read(self, document: StoredJob) -> OwnConfiguration:
        """What a new driver reads, which must be what was stored last, also where the cluster's options lie."""
        given = Configuration(document.configuration).without("$internal.")
        read = Configuration.merge(Configuration(cluster_options(document)), given)
        meant = self.effective(self._stored[document.version])
        if read != meant:
            raise Violation(f"configuration: version {document.version} is read as {read}, it is {meant}")
        if not _INTERNAL.items() <= document.configuration.items():
            raise Violation("configuration: what the system keeps beside the job's options is lost")
        return OwnConfiguration(given, document.version, document.notes)
