"""gRPC plumbing that both programs share: byte streams, the outgoing link, error statuses."""
