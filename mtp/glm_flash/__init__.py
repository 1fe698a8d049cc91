"""GLM-5.3-Flash: its description, modules, states and layers."""
