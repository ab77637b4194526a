"""Ops for layers that pass a state along a sequence, of which each rank holds a part in order.

halo        rows of the neighbours' parts, for convolutions
scan        the state that each rank begins with, given what its part does to a state
delta_rule  the gated delta rule, whose states ranks pass on while they are computed
"""
