"""Exchanges of a sequence for heads: ranks give up positions of some heads for heads of positions.

shares          which heads each rank gets
packing         which heads of which positions each rank sends to each, and where they lie
exchange_heads  the op: sends and receives them
projection      the ops that multiply before, or after, the exchange while it is under way
"""
