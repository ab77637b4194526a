"""The commands of `symm-cp`: `symm_cp/cli.py` parses arguments, a package here runs the command."""
