"""Hardware building blocks that every accelerator family shares."""
