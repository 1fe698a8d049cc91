"""Unit tests of `coordinator/text`."""
