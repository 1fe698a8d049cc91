"""Prefixes on disk: files of the states that a stage has computed, and their index."""
