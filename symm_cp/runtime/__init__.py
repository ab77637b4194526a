"""Runtimes: each carries out schedules on one kind of machine."""
