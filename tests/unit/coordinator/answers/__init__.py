"""Unit tests of `coordinator/answers`."""
