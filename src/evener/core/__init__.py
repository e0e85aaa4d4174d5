"""Words: the vocabulary shared by both halves. Pure values, no torch, no input or output but files."""
