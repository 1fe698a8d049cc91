"""GLM-5.3-Flash: its modules, states and layers. The hooks are those of `mtp.checkpoint.families.glm_flash`."""
