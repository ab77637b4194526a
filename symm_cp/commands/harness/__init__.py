"""Shared by `symm-cp demo`, `bench`, `trace`, `tune` and by `benchmarks/`."""
