"""The Triton kernels, one file an operation family."""
