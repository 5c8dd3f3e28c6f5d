"""The program that a task runs: the arguments that operators which start jobs have in common, and its upload."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from airflow_provider_ckpt import arguments
from airflow_provider_ckpt.arguments import Templated
from airflow_provider_ckpt.exceptions import CkptArgumentInvalid
from ckpt_runtime.client.clients import CkptClient
from ckpt_runtime.client.packaging import PackagingError, pack_pipeline
from ckpt_runtime.contract.jobs import RunOptions

FIELDS: Final = ("pipeline", "pipeline_id", "entry", "args", "parallelism", "configuration", "allow_non_restored_state")
"""Templated ones, which an operator's ``__init__`` sets."""
RENDERERS: Final[dict[str, str]] = {"configuration": "json", "args": "json"}


class RunsProgram:
    """Mixin of operators that have :data:`FIELDS`, and perhaps ``source_positions``."""

    pipeline: Templated[str] | None
    pipeline_id: Templated[str] | None
    entry: Templated[str] | None
    args: Templated[Sequence[str]]
    parallelism: Templated[int | str] | None
    configuration: Templated[Mapping[str, Any]] | None
    allow_non_restored_state: Templated[bool | str]
    source_positions: Templated[Mapping[str, Any]] | None = None
    log: Any

    def program_options(self) -> RunOptions:
        """The job options that the arguments give, checked.

        :raises CkptArgumentInvalid: naming the argument, its value and what is allowed.
        """
        if (self._pipeline() is None) == (self._uploaded() is None):
            raise CkptArgumentInvalid("pipeline", self.pipeline, "set either pipeline, a path, or pipeline_id")
        given: Any = self.args if self.args is not None else ()
        is_list = isinstance(given, Sequence) and not isinstance(given, (str, bytes))
        if not is_list or not all(isinstance(item, (str, int, float)) for item in given):
            raise CkptArgumentInvalid("args", given, "it must be a list of texts")
        parallelism = None if self.parallelism in (None, "", "None") else self.parallelism
        return RunOptions(
            entry_point=arguments.optional_text("entry", self.entry),
            arguments=tuple(str(item) for item in given),
            parallelism=None if parallelism is None else arguments.integer("parallelism", parallelism, minimum=1),
            configuration=arguments.options("configuration", self.configuration),
            allow_non_restored_state=arguments.boolean("allow_non_restored_state", self.allow_non_restored_state),
            source_positions=self._positions(),
        )

    def _positions(self) -> dict[str, str]:
        """Offsets may be given as a mapping, and are sent as JSON."""
        given: Any = self.source_positions
        if given in (None, "", "None"):
            return {}
        if not isinstance(given, Mapping):
            raise CkptArgumentInvalid("source_positions", given, "it must be a mapping from uids to positions")
        return {
            str(uid): json.dumps(position) if isinstance(position, Mapping) else str(position)
            for uid, position in given.items()
        }

    def _pipeline(self) -> str | None:
        return arguments.optional_text("pipeline", self.pipeline)

    def _uploaded(self) -> str | None:
        given = arguments.or_field("pipeline_id", self.pipeline_id, "pipeline_id")
        return arguments.optional_text("pipeline_id", given)

    def packed(self) -> tuple[str, bytes]:
        """File name and content of the program to upload.

        :raises CkptArgumentInvalid: when ``pipeline`` is none.
        """
        try:
            return pack_pipeline(Path(self._pipeline() or ""))
        except PackagingError as error:
            raise CkptArgumentInvalid("pipeline", self.pipeline, str(error)) from error

    def _upload(self, client: CkptClient) -> str:
        """The id of the program, which a session makes of its content."""
        filename, content = self.packed()
        pipeline_id = client.upload_pipeline(filename, content)
        self.log.info("Uploaded %s (%d bytes) as pipeline %s", filename, len(content), pipeline_id)
        return pipeline_id
