"""Weights this machine has not: from a hub by byte ranges, or from the coordinator's copy."""
