"""The layers on an Apple GPU: joined products in any format, and a kernel of this project for windows."""
