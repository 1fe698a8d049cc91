"""The live status as plain data, and its Prometheus metrics."""
