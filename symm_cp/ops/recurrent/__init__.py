"""Ops for layers that pass a state along a sequence that is spread over ranks in order.

halo              rows of the neighbours' parts
convolution       causal convolutions, which need these rows
scan              the state that each rank begins with, given each part's effect on a state
states            the states around chunks, which ranks compute and pass on in a pipeline
recurrence        any recurrence of such states, by two functions of tensors in chunks (chunks)
delta_rule        the gated delta rule
linear_attention  linear attention with a decay, as in Mamba 2
gated             what the last two share
rwkv7             RWKV-7's recurrence
"""
