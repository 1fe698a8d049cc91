"""Unit tests of `coordinator/journal`."""
