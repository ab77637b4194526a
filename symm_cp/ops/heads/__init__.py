"""Exchanges of all heads of some positions for all positions of some heads, and back.

shares          which heads each rank gets
packing         which heads and positions each rank sends to each, and where they lie
exchange_heads  the op: sends and receives them
projection      the ops that multiply before, or after, the exchange while it is under way
normed_projection  projections to heads with RMSNorm and RoPE before the exchange
"""
