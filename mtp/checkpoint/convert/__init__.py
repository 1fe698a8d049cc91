"""Conversion of checkpoints: raw to MLX with the MTP head kept, and a head added where it is missing."""
