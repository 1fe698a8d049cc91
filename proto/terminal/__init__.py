"""Terminal input and output that both programs share: logs, progress bars, sizes and exit codes."""
