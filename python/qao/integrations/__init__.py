"""qao in other libraries. None of them is imported here: each part is loaded when its library is."""
