"""The layers on an Apple GPU: fused products in any format, and a kernel of this project for windows."""
