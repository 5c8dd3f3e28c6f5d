"""Attacks against real sessions; every test of this folder carries the mark ``attack``."""
