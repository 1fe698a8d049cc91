"""Diagnosis of this machine and of the workers it reaches, one check a file."""
