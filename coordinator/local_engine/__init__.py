"""An engine in this process without HTTP, for `generate`, `inspect` and the trial of a head."""
