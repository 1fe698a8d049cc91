"""The assignment of layers to machines, from costs and memory limits. Pure functions."""
