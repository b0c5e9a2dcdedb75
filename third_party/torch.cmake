# LibTorch, from the installed torch package: headers and libtorch_cpu, used through the stable ABI alone.
# Not find_package(Torch): that fails with a CUDA build of torch where there is no CUDA toolkit, and the other way round.
set(QAO_TORCH_TARGET 2.11) # the oldest torch the library loads on

if(NOT EXISTS "${TORCH_ROOT}/version.py")
  message(FATAL_ERROR "TORCH_ROOT='${TORCH_ROOT}' is not an installed torch package. Build with setup.py (pip install), "
                      "or pass -DTORCH_ROOT=<the directory of torch/__init__.py>.")
endif()
file(STRINGS "${TORCH_ROOT}/version.py" QAO_TORCH_VERSION REGEX "^__version__")
string(REGEX REPLACE ".*['\"](.*)['\"].*" "\\1" QAO_TORCH_VERSION "${QAO_TORCH_VERSION}")
string(REGEX MATCH "^[0-9]+\\.[0-9]+" torch_release "${QAO_TORCH_VERSION}")
if(torch_release VERSION_LESS QAO_TORCH_TARGET)
  message(FATAL_ERROR "qao needs torch >= ${QAO_TORCH_TARGET} to build; ${TORCH_ROOT} holds ${QAO_TORCH_VERSION}. "
                      "Upgrade it: pip install -U torch.")
endif()

add_library(qao_torch INTERFACE)
target_include_directories(qao_torch SYSTEM INTERFACE "${TORCH_ROOT}/include"
                                                      "${TORCH_ROOT}/include/torch/csrc/api/include")
target_compile_definitions(qao_torch INTERFACE TORCH_TARGET_VERSION=0x020b000000000000) # ${QAO_TORCH_TARGET}
target_link_directories(qao_torch INTERFACE "${TORCH_ROOT}/lib")
target_link_libraries(qao_torch INTERFACE torch_cpu)
