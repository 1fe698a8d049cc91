"""Clusters, certificates and tokens for the tests of the trust."""
