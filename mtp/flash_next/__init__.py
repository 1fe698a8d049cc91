"""Qwen3.8-Flash-Next: its modules, states and layers. The hooks are those of `mtp.checkpoint.families.flash_next`."""
