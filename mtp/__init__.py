"""Mathematics of the model (layers, sampling, the MTP head, the vision tower), and checkpoints."""
