__version__ = "0.2.0"  # the only place; pyproject.toml and CMakeLists.txt read it from here
