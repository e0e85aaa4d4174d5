"""A package, so that no installed package that brings a `tests` of its own stands before it."""
