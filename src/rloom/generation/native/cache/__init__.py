"""Keys and values: where they are kept (in pages on a GPU, in padded tensors on a CPU), and attention over them."""
