"""Unit tests of `coordinator/doctor`."""
