"""Faults injected into a live cluster, and the report of their effects."""
