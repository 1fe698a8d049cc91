"""The layers in few operations, without kernels of this project."""
