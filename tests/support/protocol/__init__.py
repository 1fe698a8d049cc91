"""Models of the protocol, walked state by state, and a simulated pipeline in virtual time."""
