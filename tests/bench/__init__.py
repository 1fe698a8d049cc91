"""Programs that measure time and acceptance."""
