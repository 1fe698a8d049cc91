"""Live status as plain data, and Prometheus metrics."""
