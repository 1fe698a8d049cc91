"""Unit tests of coordinator/trust."""
