"""The HTTP API: request bodies in, JSON answers and server-sent events out."""
