"""One stage of the model in one process."""
