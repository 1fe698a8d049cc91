"""One stage of the model: its modules, and the forward pass over frames of rows."""
