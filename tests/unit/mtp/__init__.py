"""Unit tests of `mtp`."""
