"""The internal request: keys, bodies, errors, and the settings that every dialect translates its fields to."""
