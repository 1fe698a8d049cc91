"""Carriers of frames behind one protocol: the stages of this process, or a chain of workers."""
