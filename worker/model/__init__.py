"""The modules of a stage and their forward pass over flat rows."""
