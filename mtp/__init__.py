"""The model's mathematics beside its layers: sampling, the MTP head, draft depth; and checkpoints."""
