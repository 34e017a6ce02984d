"""Area, timing and energy from open synthesis tools."""
