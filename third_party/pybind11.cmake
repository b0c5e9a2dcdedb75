# pybind11, from its Python package (setup.py passes pybind11_DIR) or the system; and the Python it is built for.
set(PYBIND11_FINDPYTHON ON)
find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 2.10 REQUIRED CONFIG)
