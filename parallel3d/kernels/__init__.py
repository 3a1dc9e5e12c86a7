"""The CUDA kernels of csrc/: compiled (build.py), loaded (loader.py), and each beside its torch reference."""
