"""Weights packed by the programs of their formats, with the values that these programs read from them."""
