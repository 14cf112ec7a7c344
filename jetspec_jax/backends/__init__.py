"""How the operations of a layer are computed, a class a device."""
