"""The HTTP API: one file per dialect, one internal request, one event stream; models and the journal."""
