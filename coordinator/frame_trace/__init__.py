"""The trace of frames through all processes: aligned clocks, Chrome's trace format, and a table of step times."""
