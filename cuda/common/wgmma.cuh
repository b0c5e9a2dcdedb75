// Hopper's asynchronous matrix product of a warpgroup: d[64 x n] (+)= a[64 x 16] b[16 x n], a in registers (each warp
// 16 rows, fragments as in mma.m16n8k16), b in shared memory. Needs sm_90a.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace qao::wgmma {

// Registers written by ordinary instructions become visible to the next products.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(pending) : "memory");
}

// b as rows of 128 bytes along k, 16-byte chunks swizzled by row % 8; rows start at a multiple of 1024 bytes. Each
// k-step of 16 is 32 bytes further: descriptor + 2.
__device__ __forceinline__ uint64_t descriptor(uint32_t shared_address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = 1024 >> 4;
  return kSwizzle128 | kEightRows << 32 | 1ull << 16 | (shared_address & 0x3FFFF) >> 4;
}

#define QAO_OUT4(j) "+f"(d[j][0]), "+f"(d[j][1]), "+f"(d[j][2]), "+f"(d[j][3])
#define QAO_OUT16(j) QAO_OUT4(j), QAO_OUT4(j + 1), QAO_OUT4(j + 2), QAO_OUT4(j + 3)
#define QAO_OUT32(j) QAO_OUT16(j), QAO_OUT16(j + 4)
#define QAO_REGISTERS_32                                   \
  "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15," \
  "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QAO_REGISTERS_52                      \
  QAO_REGISTERS_32                            \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41," \
  "%42,%43,%44,%45,%46,%47,%48,%49,%50,%51"
#define QAO_REGISTERS_64 QAO_REGISTERS_52 ",%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// One product of n columns in the 16-bit type T; `accumulate` false overwrites d.
template <typename T, int n>
struct Product;

// Operands after the sums: a, b's descriptor, accumulate.
#define QAO_PRODUCT(type, name, n, sums, registers, a_registers, b_register, accumulate_register)                    \
  template <>                                                                                                        \
  struct Product<type, n> {                                                                                          \
    static __device__ __forceinline__ void run(float (&d)[n / 8][4], const uint32_t (&a)[4], uint64_t b,             \
                                               int accumulate) {                                                     \
      asm volatile("{.reg .pred p; setp.ne.b32 p, " accumulate_register ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n \
                   "k16.f32." name "." name " {" registers "}, {" a_registers "}, " b_register ", p, 1, 1, 0;}\n"    \
                   : sums                                                                                            \
                   : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                           \
    }                                                                                                                \
  };
#define QAO_SUMS_64 QAO_OUT32(0)
#define QAO_SUMS_104 QAO_OUT32(0), QAO_OUT16(8), QAO_OUT4(12)
#define QAO_SUMS_128 QAO_OUT32(0), QAO_OUT32(8)
#define QAO_PRODUCTS(type, name)                                                                \
  QAO_PRODUCT(type, name, 64, QAO_SUMS_64, QAO_REGISTERS_32, "%32,%33,%34,%35", "%36", "%37")   \
  QAO_PRODUCT(type, name, 104, QAO_SUMS_104, QAO_REGISTERS_52, "%52,%53,%54,%55", "%56", "%57") \
  QAO_PRODUCT(type, name, 128, QAO_SUMS_128, QAO_REGISTERS_64, "%64,%65,%66,%67", "%68", "%69")
QAO_PRODUCTS(__nv_bfloat16, "bf16")
QAO_PRODUCTS(__half, "f16")

#undef QAO_PRODUCTS
#undef QAO_SUMS_128
#undef QAO_SUMS_104
#undef QAO_SUMS_64
#undef QAO_PRODUCT
#undef QAO_REGISTERS_64
#undef QAO_REGISTERS_52
#undef QAO_REGISTERS_32
#undef QAO_OUT32
#undef QAO_OUT16
#undef QAO_OUT4

}  // namespace qao::wgmma
