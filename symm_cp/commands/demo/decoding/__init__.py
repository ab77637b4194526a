"""`symm-cp demo --decode`: generates tokens with a model of transformers, and compares variants."""
