"""Unit tests of exact mode."""
