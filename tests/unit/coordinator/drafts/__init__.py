"""Unit tests of `coordinator/drafts`."""
