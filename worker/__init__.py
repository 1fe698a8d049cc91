"""One stage of the model in one process: layers, caches, the engine thread, and the wires to its neighbours."""
