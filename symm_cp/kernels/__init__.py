"""Kernels in Triton, for CUDA. Triton is imported when one of them is first called."""
