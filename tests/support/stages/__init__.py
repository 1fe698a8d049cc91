"""Stages without a network: real ones in a chain, and ones that only count tokens."""
