"""Notifiers that send messages about a job."""
