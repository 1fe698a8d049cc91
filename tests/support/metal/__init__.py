"""Metal kernels on a CPU: a runner, a check of address spaces, and the Metal path of the programs."""
