"""The vision tower: images to rows that stand in a prompt among the embeddings of words."""
