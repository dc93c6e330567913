"""Doors to other libraries, one module each; importing a module is what opens its door."""
