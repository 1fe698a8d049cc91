"""Unit tests of `coordinator/local_engine`."""
