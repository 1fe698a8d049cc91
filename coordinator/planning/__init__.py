"""The split of layers over machines, from costs and memory. Pure functions."""
