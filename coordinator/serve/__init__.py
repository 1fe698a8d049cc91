"""The process of `mtp-coord serve`: its app, HTTP server, endpoints, settings of clients, and change of the model."""
