"""One stage as a machine that turns frames into frames, on the one thread that touches MLX."""
