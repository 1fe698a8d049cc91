"""Prompts and statistics."""
