"""The coordinator's part of the trust: the certificate authority, the registry of nodes and tokens, and joining."""
