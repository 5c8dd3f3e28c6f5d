"""The root of all refusals to give a checkpoint's state to a job."""

from __future__ import annotations


class StateAssignmentError(ValueError):
    """A checkpoint does not fit a job graph; nothing may be deployed from it."""
