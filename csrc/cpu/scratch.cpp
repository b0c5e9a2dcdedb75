// Per-thread memory that kernels reuse between calls, in huge pages if large.
#include "cpu/scratch.h"

#include <sys/mman.h>

#include <cstdlib>
#include <memory>
#include <new>

namespace qao::cpu {
namespace {

constexpr int64_t kHugePage = int64_t{2} << 20;

struct Buffer {
  struct Free {
    void operator()(void* data) const { std::free(data); }
  };
  std::unique_ptr<void, Free> data;
  int64_t bytes = 0;
};

}  // namespace

void* scratch(Scratch kind, int64_t bytes) {
  thread_local Buffer buffers[8];
  Buffer& buffer = buffers[static_cast<int>(kind)];
  if (bytes > buffer.bytes) {
    const int64_t alignment = bytes >= kHugePage ? kHugePage : 64;
    const int64_t rounded = (bytes + alignment - 1) / alignment * alignment;
    buffer.data.reset();
    buffer.bytes = 0;
    buffer.data.reset(std::aligned_alloc(static_cast<size_t>(alignment), static_cast<size_t>(rounded)));
    if (!buffer.data) throw std::bad_alloc();
    if (rounded >= kHugePage) madvise(buffer.data.get(), static_cast<size_t>(rounded), MADV_HUGEPAGE);
    buffer.bytes = rounded;
  }
  return buffer.data.get();
}

}  // namespace qao::cpu
