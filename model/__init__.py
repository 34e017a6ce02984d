"""NumPy golden model of the AutoEMatic accelerator; the reference of every bench."""
