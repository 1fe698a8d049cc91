"""The trust that both programs share: identities, certificates, join tokens and the state directory."""
