"""Mathematics beside the layers of the model (sampling, the MTP head, draft depth), and checkpoints."""
