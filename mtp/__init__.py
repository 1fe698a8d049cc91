"""Mathematics only: checkpoint names, the MTP head, drafting, sampling, acceptance. MLX, no network."""
