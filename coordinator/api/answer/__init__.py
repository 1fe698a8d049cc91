"""The internal event stream: tokens become text, reasoning and calls, and a dialect's writer sends them."""
