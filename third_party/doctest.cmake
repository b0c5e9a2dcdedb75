# doctest, from the system (Debian and Ubuntu: doctest-dev): the C++ test framework. Only the C++ tests need it.
find_package(doctest 2.4 REQUIRED)
