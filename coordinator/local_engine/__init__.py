"""An engine in this process, without HTTP: for `generate`, for `inspect`, and to try a checkpoint's head."""
