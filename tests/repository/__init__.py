"""Checks of the repository itself: layout, docs, flags, packaging, deploy files."""
