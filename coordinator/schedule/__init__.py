"""The generation loop and its scheduler: requests become frames, outcomes become tokens; prefixes and backups."""
