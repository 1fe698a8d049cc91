"""The prose rules of CONTRIBUTING as checks: of docstrings, comments, messages and pages."""
