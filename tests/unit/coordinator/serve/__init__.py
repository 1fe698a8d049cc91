"""Unit tests of `coordinator/serve`."""
