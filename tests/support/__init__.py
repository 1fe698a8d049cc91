"""Helpers of the tests, by area."""
