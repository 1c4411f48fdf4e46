"""Pure tensor functions, one per equation: no modules, no configuration, no logging."""
