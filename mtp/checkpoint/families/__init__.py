"""The description of a model family: a base class, its tables of fields and parameters, and the families of Qwen."""
