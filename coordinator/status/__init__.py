"""Records for people: of frames, the status as plain data, history, traces and Prometheus metrics."""
