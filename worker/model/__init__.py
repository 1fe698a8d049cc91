"""The modules of a stage, the choice of the variants of their layers, and their forward pass over flat rows."""
