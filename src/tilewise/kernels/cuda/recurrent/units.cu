// Numbers sixteen bytes at a time between multiprocessors, and products of small tiles by matrix units.
//
// REAL is 0 for fp32, 1 for fp16, 2 for bf16. PRECISE: products of fp32 numbers by three of their TF32 parts.

using i64 = long long;

template <int KIND> struct Reals { using type = unsigned short; };
template <> struct Reals<0> { using type = float; };
using Real = typename Reals<REAL>::type;

constexpr int WIDE = REAL == 0 ? 4 : 8;  // numbers in sixteen bytes
constexpr int CHUNK = 4 * WIDE;          // terms of a sum that a warp multiplies at a time, in two steps of its units
constexpr unsigned EMPTY = ~0u;          // four bytes of an exchanged tensor that nobody has written

struct alignas(16) Words { unsigned w[4]; };

__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(unsigned short bits) {
  return REAL == 2 ? float_of_bfloat16(bits) : float_of_half(bits);
}
// The bits of a result: a NaN is never the pattern that stands for "not written yet".
__device__ __forceinline__ unsigned bits_to_store(float value) {
  if constexpr (REAL == 0) return value == value ? bits_of(value) : 0x7fffffffu;
  else if (value != value) return 0x7fffu;
  else return REAL == 2 ? bfloat16_of_float(value) : half_of_float(value);
}
__device__ __forceinline__ float rounded(float value) {
  if constexpr (REAL == 0) return value;
  else return widen((unsigned short)bits_to_store(value));
}
__device__ __forceinline__ Real narrow(float value) {
  if constexpr (REAL == 0) return value;
  else return (unsigned short)bits_to_store(value);
}

#ifndef EMULATED
// Sixteen bytes that other multiprocessors write or read meanwhile, in the cache that all share. Of each four of them
// none is seen without the others.
__device__ __forceinline__ uint4 load_relaxed(const void* p) {
  uint4 a;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(a.x), "=r"(a.y), "=r"(a.z), "=r"(a.w) : "l"(p)
               : "memory");
  return a;
}
__device__ __forceinline__ void store_relaxed(void* p, uint4 a) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w)
               : "memory");
}
// The same bits, of which the compiler knows nothing: what is made of them is made anew in every step, not kept.
__device__ __forceinline__ unsigned opaque(unsigned bits) {
  asm volatile("" : "+r"(bits));
  return bits;
}
// Where ``p`` is in block ``rank`` of a cluster of SIZE blocks.
template <int SIZE> __device__ __forceinline__ unsigned peer_address(const void* p, int rank) { return cluster_address(p, rank); }
// Between two looks at what another block is to write.
__device__ __forceinline__ void look_again() {}

// sums += a b of 16 x 8 numbers by a warp: ``a`` has 16 rows, ``b`` 8 columns. KIND is 0 for TF32, 1 for fp16, 2 for bf16.
#define MULTIPLY(SHAPE, TYPES)                                                                                       \
  asm volatile("mma.sync.aligned." SHAPE ".row.col.f32." TYPES ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};" \
               : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])                                           \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1))
template <int KIND>
__device__ __forceinline__ void multiply_units(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (KIND == 0) MULTIPLY("m16n8k8", "tf32.tf32");
  else if constexpr (KIND == 1) MULTIPLY("m16n8k16", "f16.f16");
  else MULTIPLY("m16n8k16", "bf16.bf16");
}
#endif

__device__ __forceinline__ Words load_shared_words(const void* p) {
  const uint4 a = load_relaxed(p);
  return {{a.x, a.y, a.z, a.w}};
}
__device__ __forceinline__ void store_shared_words(void* p, const Words& a) {
  store_relaxed(p, make_uint4(a.w[0], a.w[1], a.w[2], a.w[3]));
}

// A number rounded to TF32's eleven digits, and what that lacks.
__device__ __forceinline__ unsigned head_of(unsigned bits) { return (bits + 0x1000u) & 0xffffe000u; }
__device__ __forceinline__ unsigned rest_of(unsigned bits, unsigned head) { return bits_of(float_of(bits) - float_of(head)); }

__device__ __forceinline__ void multiply(float (&sums)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
  if constexpr (REAL != 0) multiply_units<REAL>(sums, a, b0, b1);
  else {
    unsigned head[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) head[i] = head_of(a[i]);
    b0 = opaque(b0), b1 = opaque(b1);
    const unsigned h0 = head_of(b0), h1 = head_of(b1);
    if constexpr (PRECISE) {
      unsigned rest[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) rest[i] = rest_of(a[i], head[i]);
      multiply_units<0>(sums, rest, h0, h1);
      multiply_units<0>(sums, head, rest_of(b0, h0), rest_of(b1, h1));
    }
    multiply_units<0>(sums, head, h0, h1);
  }
}

__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.f, 1.f + __expf(-x)); }
// Beyond 15 it is 1 in fp32; a NaN stays one.
__device__ __forceinline__ float hyperbolic_tangent(float x) {
  const float bound = x > 15.f ? 15.f : x < -15.f ? -15.f : x;
  const float e = __expf(2.f * bound);
  return __fdividef(e - 1.f, e + 1.f);
}
