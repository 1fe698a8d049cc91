"""Unit tests of `coordinator/trace`."""
