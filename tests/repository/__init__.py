"""Checks of the repository itself: layout, prose, docs, flags, packaging, deploy files."""
