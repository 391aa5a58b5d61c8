"""HTTP, by area. A handler reads the request, asks the gateway, and writes the answer; it decides nothing."""
