"""Fuzzing of everything that reads bytes from other machines: targets, mutations and a corpus."""
