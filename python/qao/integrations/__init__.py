"""Integrations with other libraries. Each is imported only after its library is."""
