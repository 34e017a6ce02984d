"""Amaranth hardware of the AutoEMatic accelerator."""
