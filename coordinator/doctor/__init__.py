"""The diagnosis of this machine and of the workers that it reaches: its checks, and one of the kernels."""
