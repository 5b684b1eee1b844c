// What CUDA C++ has no words for, or only in headers that NVRTC may not find: half precision as bits, asynchronous
// copies, predicated access.

__device__ __forceinline__ float float_of_half(unsigned short bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ unsigned short half_of_float(float value) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ float float_of(unsigned bits) { return __uint_as_float(bits); }

__device__ __forceinline__ float float_of_bfloat16(unsigned short bits) {
  return float_of((unsigned)bits << 16);
}

__device__ __forceinline__ unsigned short bfloat16_of_float(float value) {
  unsigned short bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

// Global to shared memory without registers; ``wait_copies`` waits for those of the calling thread.
template <class T> __device__ __forceinline__ void copy_async(T* to, const T* from) {
  const unsigned address = (unsigned)__cvta_generic_to_shared(to);
  if constexpr (sizeof(T) == 16) asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(from));
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(address), "l"(from), "n"(sizeof(T)));
}

__device__ __forceinline__ void wait_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Loads (0 where not ``wanted``) and stores under a condition. As predicated instructions, for of as many conditions as
// there are rows a compiler makes branches. STREAM: accessed once, so the cache need not keep it.
#define WHEN(CONDITION, INSTRUCTION) "{ .reg .pred q; setp.ne.s32 q, " CONDITION ", 0; @q " INSTRUCTION "; }"

#define LOAD_IF(T, CONDITION, OPERANDS, ...)                                                                        \
  template <bool STREAM> __device__ __forceinline__ T load_if(bool wanted, const T* p) {                            \
    T a = {};                                                                                                       \
    if constexpr (STREAM)                                                                                           \
      asm(WHEN(CONDITION, "ld.global.cs." OPERANDS) : __VA_ARGS__ : "r"((int)wanted), "l"(p));                      \
    else                                                                                                            \
      asm(WHEN(CONDITION, "ld.global." OPERANDS) : __VA_ARGS__ : "r"((int)wanted), "l"(p));                         \
    return a;                                                                                                       \
  }
LOAD_IF(float, "%1", "f32 %0, [%2]", "+f"(a))
LOAD_IF(float2, "%2", "v2.f32 {%0, %1}, [%3]", "+f"(a.x), "+f"(a.y))
LOAD_IF(unsigned, "%1", "u32 %0, [%2]", "+r"(a))
LOAD_IF(unsigned short, "%1", "u16 %0, [%2]", "+h"(a))

#define STORE_IF(T, OPERANDS, ...)                                                                                  \
  template <bool STREAM> __device__ __forceinline__ void store_if(bool wanted, T* p, T a) {                         \
    if constexpr (STREAM)                                                                                           \
      asm volatile(WHEN("%0", "st.global.cs." OPERANDS)::"r"((int)wanted), "l"(p), __VA_ARGS__ : "memory");         \
    else                                                                                                            \
      asm volatile(WHEN("%0", "st.global." OPERANDS)::"r"((int)wanted), "l"(p), __VA_ARGS__ : "memory");            \
  }
STORE_IF(float, "f32 [%1], %2", "f"(a))
STORE_IF(float2, "v2.f32 [%1], {%2, %3}", "f"(a.x), "f"(a.y))
STORE_IF(unsigned, "u32 [%1], %2", "r"(a))
STORE_IF(unsigned short, "u16 [%1], %2", "h"(a))

__device__ __forceinline__ unsigned bits_of(float value) { return __float_as_uint(value); }

// A block's dynamic shared memory.
extern __shared__ float4 dynamic_shared[];
__device__ __forceinline__ float4* shared_memory() { return dynamic_shared; }

// Thread block clusters, from compute capability 9.0 on. All blocks come to ``arrive_cluster``, so that they have started,
// before one stores into another's shared memory: where ``cluster_address`` says that ``p`` lies in block ``rank``.
#if __CUDA_ARCH__ >= 900
#define ON_CLUSTERS(...) __VA_ARGS__
#else
#define ON_CLUSTERS(...) __trap()
#endif
__device__ __forceinline__ void arrive_cluster() { ON_CLUSTERS(asm volatile("barrier.cluster.arrive.release;" ::: "memory")); }
__device__ __forceinline__ void wait_cluster() { ON_CLUSTERS(asm volatile("barrier.cluster.wait.acquire;" ::: "memory")); }

__device__ __forceinline__ unsigned cluster_address(const void* p, unsigned rank) {
  unsigned own = (unsigned)__cvta_generic_to_shared(p), found = own;
  ON_CLUSTERS(asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(found) : "r"(own), "r"(rank)));
  return found;
}

__device__ __forceinline__ void store_cluster(unsigned address, float4 a) {
  ON_CLUSTERS(asm volatile("st.shared::cluster.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(address), "f"(a.x), "f"(a.y), "f"(a.z),
                       "f"(a.w)
                       : "memory"));
}
__device__ __forceinline__ void store_cluster(unsigned address, float2 a) {
  ON_CLUSTERS(asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(address), "f"(a.x), "f"(a.y) : "memory"));
}
