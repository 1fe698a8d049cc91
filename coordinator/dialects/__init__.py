"""The dialects of the API: the fields of their bodies, and the formats of their answers."""
