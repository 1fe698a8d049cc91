"""Answers to requests: choices, their delivery, stored answers and the journal."""
