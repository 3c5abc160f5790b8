"""A server for the Tinker API: routes (HTTP and wire format), service (order, futures), backend (actors)."""
