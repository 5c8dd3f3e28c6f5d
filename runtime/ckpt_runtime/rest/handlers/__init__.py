"""Handlers by topic; each module has one ``router``."""
