"""Measures and reports; shared by commands and by `benchmarks/`."""
