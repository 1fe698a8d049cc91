"""Any model of mlx-lm: its own class, of which a stage runs some layers."""
