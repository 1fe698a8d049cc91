"""One stage of the model in one process."""

# Before the first import of mlx-lm, see there.
import mtp as mtp
