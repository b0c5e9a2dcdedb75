__version__ = "0.1.0"  # the only place; pyproject.toml and CMakeLists.txt read it from here
