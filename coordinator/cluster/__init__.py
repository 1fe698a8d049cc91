"""Workers, membership, the choice of a plan as pure decisions, and the pipelines that run plans."""
