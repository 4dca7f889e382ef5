"""What carries the SGLang patch tree: the loader and its lock, the CPU reference, the command line."""
