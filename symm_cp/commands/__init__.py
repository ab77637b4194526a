"""The commands of `symm-cp`: `symm_cp/cli.py` parses, a package here does the work."""
