"""An HTTP server and client around a fake generator."""
