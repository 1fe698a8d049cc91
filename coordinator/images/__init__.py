"""Images of requests: from the bytes that clients send to rows for the first stage."""
