"""The process that clients talk to: an HTTP server that plans, schedules and drives a pipeline of workers."""
