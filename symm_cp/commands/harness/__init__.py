"""Shared by `symm-cp demo`, `bench`, `trace`, `calibrate`, `tune` and by `benchmarks/`."""
