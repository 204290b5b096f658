"""Memory: alignment arithmetic, page-aligned buffers in a bounded pool, and checksums. Knows no torch and no zip."""
