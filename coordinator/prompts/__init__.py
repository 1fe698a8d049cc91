"""The prompts of requests: conversations, images, the internal request, and the types of fields."""
