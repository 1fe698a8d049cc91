"""Stored answers: they run without their client, outlive the coordinator, and are read again by their id."""
