"""The HTTP API: OpenAI's chat and text completions, and what operators ask of a server."""
