"""The diagnosis of this machine and of the workers that it reaches, one check per file."""
