"""Unit tests of `coordinator/dialects`."""
