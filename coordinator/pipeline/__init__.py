"""The carriers of frames behind one protocol: stages in this process, or a chain of workers."""
