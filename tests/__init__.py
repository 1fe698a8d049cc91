"""The tests: unit, parity, cluster and chaos tests, benches, and checks of the repository."""
