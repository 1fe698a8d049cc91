"""The wire format: frames, operations, control messages and errors."""

import os

# gRPC has no setting for the lowest TLS version, and reads this variable when it is imported. Keys are P-256, so a
# TLS 1.2 handshake that may only use RSA fails. The variable does not apply to TLS 1.3.
os.environ["GRPC_SSL_CIPHER_SUITES"] = "ECDHE-RSA-AES256-GCM-SHA384"

# gRPC would write a line for each handshake that fails, and strangers could fill the log. Callers get the errors.
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

# gRPC's own resolver does not know the names of the local network, such as mac-2.local. The system's does.
os.environ.setdefault("GRPC_DNS_RESOLVER", "native")
