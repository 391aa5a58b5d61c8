"""The frozen base model: how it is read, taken apart into layers, and computed for packed sequences of many tenants."""
