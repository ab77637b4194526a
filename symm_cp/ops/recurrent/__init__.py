"""Ops for layers that pass a state along a sequence, of which each rank holds a part in order.

halo              rows of the neighbours' parts
convolution       causal convolutions, which see them
scan              the state that each rank begins with, given what its part does to a state
states            the states around chunks, which ranks pass on while they are computed
delta_rule        the gated delta rule, in chunks
linear_attention  linear attention with a decay, as of Mamba 2, in chunks
recurrence        what the last two have in common, with chunks.py and documents.py
"""
