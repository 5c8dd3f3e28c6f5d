"""A served REST application over an in-memory dispatcher that is new for each test."""

from __future__ import annotations

from tests.unit.runtime.rest.served import gateway, served_app, url

__all__ = ["gateway", "served_app", "url"]
