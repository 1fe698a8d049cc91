"""Unit tests of `coordinator/frame_trace`."""
