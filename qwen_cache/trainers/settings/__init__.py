"""Settings of other trainers, read as ours: one table of names per trainer, and `read`, which finds the right one."""
