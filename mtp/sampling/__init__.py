"""The choice of a token from logits: noise, filters, penalties, and the acceptance of drafts."""
