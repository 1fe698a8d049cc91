"""The HTTP API: one folder per dialect, above one internal request and one internal event stream."""
