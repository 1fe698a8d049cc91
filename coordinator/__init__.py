"""The process that clients talk to: an HTTP server that plans, schedules and drives a pipeline of workers."""

# Before the first import of mlx-lm, see there.
import mtp as mtp
