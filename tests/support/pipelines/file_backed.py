"""The pipeline of :mod:`blocks` with its state in :mod:`file_backend`."""

from blocks import pipeline as pipeline  # noqa: PLC0414
from file_backend import FileKeyedStateBackend

from ckpt_runtime.state.registry import register_backend

register_backend("hashmap", FileKeyedStateBackend)
