"""The wire format: frames, operations, control messages, errors. The modules of this folder do no I/O."""
