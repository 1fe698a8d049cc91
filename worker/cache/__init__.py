"""The state that a stage keeps for each sequence, and its rollback (DESIGN §4)."""
