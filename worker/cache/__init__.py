"""What a stage keeps of its sequences, and how it rolls back (DESIGN §4)."""
