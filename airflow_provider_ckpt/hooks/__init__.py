"""Hooks: how a connection becomes a REST client."""
