"""The model that comes with the package: a small Qwen3.5 with its multi-token-prediction head.

It lets `pip install` be followed by tokens: no download, no account, one CPU core. README.md beside
this file is its model card; `python -m mtp.builtin.training.train` is how it was made.
"""

from pathlib import Path

__all__ = ["checkpoint_dir"]


def checkpoint_dir() -> Path:
    """Folder with config.json, model.safetensors and the tokenizer, in the raw Hugging Face layout."""
    return Path(__file__).resolve().parent / "checkpoint"
