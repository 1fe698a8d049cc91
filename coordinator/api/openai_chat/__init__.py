"""The dialect of OpenAI's chat completions, completions and models."""
