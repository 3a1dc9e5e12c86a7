"""The CUDA kernels of csrc/: compiled (build.py), loaded (library.py), and each beside its torch reference."""
