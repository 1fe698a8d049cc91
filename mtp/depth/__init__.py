"""The online choice of how many tokens to draft."""
