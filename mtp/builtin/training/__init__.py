"""The torch programs that trained the built-in model. Not part of the wheel."""
