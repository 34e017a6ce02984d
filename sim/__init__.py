"""cocotb benches, drivers and the simulation runner."""
