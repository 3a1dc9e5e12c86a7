"""CUDA and Triton kernels with their PyTorch references."""
