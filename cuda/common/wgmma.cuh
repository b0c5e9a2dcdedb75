// Hopper's WGMMA instruction: d[64 x n] (+)= a[64 x k] b[k x n], asynchronous, per warpgroup.
//
// k spans 32 bytes: 16 16-bit values or 32 8-bit values. a is in registers (16 rows per warp, fragments as in
// mma.m16n8k16 and m16n8k32) or in shared memory, b in shared memory. Needs sm_90a.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace qao::wgmma {

// Orders register writes before the next WGMMA.
__device__ __forceinline__ void fence() { asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory"); }
__device__ __forceinline__ void commit() { asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory"); }
template <int pending>
__device__ __forceinline__ void wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(pending) : "memory");
}

// Descriptor of a K-major matrix with 128-byte swizzle: rows of 128 bytes, 16-byte chunks permuted by row % 8,
// 1024-byte aligned. Each k-step advances 32 bytes: descriptor + 2.
__device__ __forceinline__ uint64_t descriptor(uint32_t shared_address) {
  constexpr uint64_t kSwizzle128 = 1ull << 62, kEightRows = 1024 >> 4;
  return kSwizzle128 | kEightRows << 32 | ((1u << 16) + (shared_address >> 4));
}

// Accumulators d[n / 8][4] as operands of the assembly, and their names.
#define QAO_4(c, j) c(d[j][0]), c(d[j][1]), c(d[j][2]), c(d[j][3])
#define QAO_16(c, j) QAO_4(c, j), QAO_4(c, j + 1), QAO_4(c, j + 2), QAO_4(c, j + 3)
#define QAO_32(c, j) QAO_16(c, j), QAO_16(c, j + 4)
#define QAO_64(c, j) QAO_32(c, j), QAO_32(c, j + 8)
#define QAO_SUMS_16(c) QAO_4(c, 0), QAO_4(c, 1)
#define QAO_SUMS_32(c) QAO_16(c, 0)
#define QAO_SUMS_64(c) QAO_32(c, 0)
#define QAO_SUMS_128(c) QAO_64(c, 0)
#define QAO_SUMS_160(c) QAO_64(c, 0), QAO_16(c, 16)
#define QAO_SUMS_192(c) QAO_64(c, 0), QAO_32(c, 16)
#define QAO_SUMS_256(c) QAO_64(c, 0), QAO_64(c, 16)
#define QAO_NAMES_16 "%0,%1,%2,%3,%4,%5,%6,%7"
#define QAO_NAMES_32 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define QAO_NAMES_64 QAO_NAMES_32 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define QAO_NAMES_128                                                                                    \
  QAO_NAMES_64                                                                                           \
  ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56" \
  ",%57,%58,%59,%60,%61,%62,%63"
#define QAO_NAMES_160 QAO_NAMES_128 ",%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79"
#define QAO_NAMES_192 \
  QAO_NAMES_160       \
  ",%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95"
#define QAO_NAMES_256                                                                                          \
  QAO_NAMES_192                                                                                                \
  ",%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117" \
  ",%118,%119,%120,%121,%122,%123,%124,%125,%126,%127"
#define QAO_FLOAT(sum) "+f"(sum)
#define QAO_INT(sum) "+r"(sum)

// One WGMMA of n columns. Operand types: __nv_bfloat16, __half, int8_t, and E4m3 for 8-bit floats; E5m2: a is e5m2, b
// is e4m3. `accumulate` false overwrites d.
struct E4m3 {};
struct E5m2 {};
template <typename T, int n>
struct Product;

// Operand numbers r0.. follow the accumulators.
#define QAO_FROM_REGISTERS(Sum, c, n, k, types, signs, r0, r1, r2, r3, r4, r5)                                        \
  static __device__ __forceinline__ void run(Sum(&d)[n / 8][4], const uint32_t (&a)[4], uint64_t b, int accumulate) { \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #r5 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k" k types       \
                 " {" QAO_NAMES_##n "}, {%" #r0 ",%" #r1 ",%" #r2 ",%" #r3 "}, %" #r4 ", p" signs ";}\n"              \
                 : QAO_SUMS_##n(c)                                                                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));                              \
  }
#define QAO_FROM_SHARED(Sum, c, n, k, types, signs, r0, r1, r2)                                                 \
  static __device__ __forceinline__ void run(Sum(&d)[n / 8][4], uint64_t a, uint64_t b, int accumulate) {       \
    asm volatile("{.reg .pred p; setp.ne.b32 p, %" #r2 ", 0;\nwgmma.mma_async.sync.aligned.m64n" #n "k" k types \
                 " {" QAO_NAMES_##n "}, %" #r0 ", %" #r1 ", p" signs ";}\n"                                     \
                 : QAO_SUMS_##n(c)                                                                              \
                 : "l"(a), "l"(b), "r"(accumulate));                                                            \
  }
#define QAO_PRODUCT_16(T, name, n, r0, r1, r2, r3, r4, r5)                                                    \
  template <>                                                                                                 \
  struct Product<T, n> {                                                                                      \
    QAO_FROM_REGISTERS(float, QAO_FLOAT, n, "16", ".f32." name "." name, ", 1, 1, 0", r0, r1, r2, r3, r4, r5) \
  };
#define QAO_PRODUCT_8(T, Sum, c, types, signs, n, r0, r1, r2, r3, r4, r5)     \
  template <>                                                                 \
  struct Product<T, n> {                                                      \
    QAO_FROM_REGISTERS(Sum, c, n, "32", types, signs, r0, r1, r2, r3, r4, r5) \
    QAO_FROM_SHARED(Sum, c, n, "32", types, signs, r0, r1, r2)                \
  };
#define QAO_PRODUCT_E5M2(n, ...)                                                           \
  template <>                                                                              \
  struct Product<E5m2, n> {                                                                \
    QAO_FROM_REGISTERS(float, QAO_FLOAT, n, "32", ".f32.e5m2.e4m3", ", 1, 1", __VA_ARGS__) \
  };
#define QAO_PRODUCTS(n, ...)                                            \
  QAO_PRODUCT_16(__nv_bfloat16, "bf16", n, __VA_ARGS__)                 \
  QAO_PRODUCT_16(__half, "f16", n, __VA_ARGS__)                         \
  QAO_PRODUCT_8(int8_t, int, QAO_INT, ".s32.s8.s8", "", n, __VA_ARGS__) \
  QAO_PRODUCT_8(E4m3, float, QAO_FLOAT, ".f32.e4m3.e4m3", ", 1, 1", n, __VA_ARGS__)
QAO_PRODUCT_16(__nv_bfloat16, "bf16", 16, 8, 9, 10, 11, 12, 13)
QAO_PRODUCTS(32, 16, 17, 18, 19, 20, 21)
QAO_PRODUCTS(64, 32, 33, 34, 35, 36, 37)
QAO_PRODUCTS(128, 64, 65, 66, 67, 68, 69)
QAO_PRODUCTS(160, 80, 81, 82, 83, 84, 85)
QAO_PRODUCTS(192, 96, 97, 98, 99, 100, 101)
QAO_PRODUCTS(256, 128, 129, 130, 131, 132, 133)
QAO_PRODUCT_E5M2(64, 32, 33, 34, 35, 36, 37)
QAO_PRODUCT_E5M2(128, 64, 65, 66, 67, 68, 69)
QAO_PRODUCT_E5M2(160, 80, 81, 82, 83, 84, 85)
QAO_PRODUCT_E5M2(192, 96, 97, 98, 99, 100, 101)
QAO_PRODUCT_E5M2(256, 128, 129, 130, 131, 132, 133)

#undef QAO_PRODUCTS
#undef QAO_PRODUCT_E5M2
#undef QAO_PRODUCT_8
#undef QAO_PRODUCT_16
#undef QAO_FROM_SHARED
#undef QAO_FROM_REGISTERS
#undef QAO_INT
#undef QAO_FLOAT
#undef QAO_NAMES_256
#undef QAO_NAMES_192
#undef QAO_NAMES_160
#undef QAO_NAMES_128
#undef QAO_NAMES_64
#undef QAO_NAMES_32
#undef QAO_NAMES_16
#undef QAO_SUMS_256
#undef QAO_SUMS_192
#undef QAO_SUMS_160
#undef QAO_SUMS_128
#undef QAO_SUMS_64
#undef QAO_SUMS_32
#undef QAO_SUMS_16
#undef QAO_64
#undef QAO_32
#undef QAO_16
#undef QAO_4

}  // namespace qao::wgmma
