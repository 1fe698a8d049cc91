"""Tests with clients of other projects, in Python and node, which `make clients` installs."""
