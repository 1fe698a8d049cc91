"""The process of `mtp-coord serve`: its HTTP server, its parts, and the change of its model."""
