"""What goes over a slow link in fewer bits, one interface for all ways; see `codec.Codec`."""
