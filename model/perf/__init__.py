"""Performance and energy of whole language models on the accelerator and on single-format ones (docs/performance-model.md)."""
