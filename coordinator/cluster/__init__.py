"""Workers, membership, and the choice of the next action as pure decisions over a view of the cluster."""
