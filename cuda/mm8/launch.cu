#include "qao/mm8.h"

namespace qao::mm8 {

Status launch(const Problem&, const Plan&, const Arguments&, void*) {
  return Status::error("mm8 has no CUDA kernels yet");
}

}  // namespace qao::mm8
