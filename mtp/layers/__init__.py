"""The layers of the model over flat rows: one interface, and its variants side by side."""
