"""The model families, one file for each: its names in configs, its modules, and its differences from the others."""
