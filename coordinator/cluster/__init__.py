"""Which workers there are, and which plan they serve: pure state and decisions, effects at the edge."""
