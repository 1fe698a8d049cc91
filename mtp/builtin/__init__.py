"""The model that comes with the package: a small Qwen3.5 with its multi-token-prediction head.

The package generates tokens right after its installation, without a download or an account, on one CPU core.
README.md in this folder is the model card, and says how it was trained.
"""

from pathlib import Path

__all__ = ["checkpoint_dir"]


def checkpoint_dir() -> Path:
    """Return the folder with config.json, model.safetensors and the tokenizer, in the raw Hugging Face layout."""
    return Path(__file__).resolve().parent / "checkpoint"
