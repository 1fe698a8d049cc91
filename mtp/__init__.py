"""Mathematics of the model (layers, sampling, the MTP head, draft depth), and checkpoints."""
