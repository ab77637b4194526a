"""Tensors around an op: shards and splits of a dimension, alignment, the memory of results."""
