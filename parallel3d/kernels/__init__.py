"""CUDA and Triton kernels, their PyTorch references, and the choice between them."""
