"""Exact mode: every row is computed by kernels whose arithmetic does not depend on the rows beside it."""
