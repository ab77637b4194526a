"""`symm-cp demo`: trains a small transformer in three ways, and compares the results."""
