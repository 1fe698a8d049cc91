"""Checkpoints by name: local directories, the hub's cache, and byte ranges over HTTP."""
