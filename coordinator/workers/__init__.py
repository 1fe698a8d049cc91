"""Workers as the coordinator reaches them: discovery, control calls, descriptions, and weights they ask for."""
