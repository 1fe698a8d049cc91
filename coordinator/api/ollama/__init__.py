"""The dialect of Ollama's API."""
