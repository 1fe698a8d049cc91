"""Finds the workers, splits the layers, schedules requests over the pipeline, and serves them over HTTP."""
