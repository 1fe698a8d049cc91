"""The worker process: its gRPC service, lease, loaded stage and binding into a plan."""
