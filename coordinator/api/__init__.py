"""The HTTP API and its server: one file per dialect, one internal request, one event stream; models and the journal."""
