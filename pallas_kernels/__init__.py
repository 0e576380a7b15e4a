"""The op as kernels, for TPU and GPU, and in plain array code."""
