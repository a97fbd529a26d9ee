"""Metal kernels, executed on Linux by an emulator."""
