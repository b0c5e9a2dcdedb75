// Runs a model that AOTInductor packaged, without Python: loads qao's operators, then the package, and prints the sum
// of the result.
//
//   run <_C.so of qao> <model.pt2> <tokens> <features>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

#include <cstdlib>
#include <exception>
#include <iostream>

int main(int argc, char** argv) {
  if (argc != 5) {
    std::cerr << "usage: run <_C.so of qao> <model.pt2> <tokens> <features>\n";
    return 2;
  }
  // Loading the library registers torch.ops.qao.*; it needs nothing but libtorch, and stays loaded.
  if (dlopen(argv[1], RTLD_NOW | RTLD_GLOBAL) == nullptr) {
    std::cerr << dlerror() << "\n";
    return 1;
  }
  try {
    const c10::InferenceMode no_autograd;
    torch::inductor::AOTIModelPackageLoader model(argv[2]);
    const int64_t tokens = std::atoll(argv[3]), features = std::atoll(argv[4]);
    // x [tokens, features]: row m holds m + 1 everywhere, over the number of features.
    const at::Tensor rows = torch::arange(1, tokens + 1, torch::kFloat32).unsqueeze(1) / features;
    const at::Tensor y = model.run({rows.expand({tokens, features}).contiguous()}).at(0);
    std::cout << "{\"shape\": [";
    for (int64_t i = 0; i < y.dim(); ++i) std::cout << (i ? ", " : "") << y.size(i);
    std::cout.precision(17);
    std::cout << "], \"sum\": " << y.to(torch::kFloat64).sum().item<double>() << "}\n";
  } catch (const std::exception& error) {
    std::cerr << error.what() << "\n";
    return 1;
  }
}
