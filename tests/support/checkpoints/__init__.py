"""Small checkpoints, a fake hub, and small disks."""
