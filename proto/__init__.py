"""The wire format: frames, operations, control messages and errors. The modules of this folder do no I/O."""
