"""Weights that this machine lacks, read from the hub or from the coordinator."""
