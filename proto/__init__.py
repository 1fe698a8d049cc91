"""What two processes must agree on: words, errors, frames, control messages. No MLX, no I/O."""
