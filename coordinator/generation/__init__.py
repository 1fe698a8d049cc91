"""Requests to frames and outcomes to tokens: the generation loop, its scheduler, and what they count."""
