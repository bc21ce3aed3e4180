"""How many tokens each block keeps on the device, and which."""
