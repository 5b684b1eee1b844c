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

__device__ __forceinline__ float float_of_bfloat16(unsigned short bits) {
  return __uint_as_float((unsigned)bits << 16);
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
// there are rows a compiler makes branches. STREAM: read once, so the cache need not keep it.
template <bool STREAM> __device__ __forceinline__ float load_if(bool wanted, const float* p) {
  float a;
  if constexpr (STREAM) {
    asm("{ .reg .pred q; setp.ne.s32 q, %1, 0; mov.f32 %0, 0f00000000; @q ld.global.cs.f32 %0, [%2]; }"
        : "=f"(a) : "r"((int)wanted), "l"(p));
  } else {
    asm("{ .reg .pred q; setp.ne.s32 q, %1, 0; mov.f32 %0, 0f00000000; @q ld.global.f32 %0, [%2]; }"
        : "=f"(a) : "r"((int)wanted), "l"(p));
  }
  return a;
}

template <bool STREAM> __device__ __forceinline__ float2 load_if(bool wanted, const float2* p) {
  float a, b;
  if constexpr (STREAM) {
    asm("{ .reg .pred q; setp.ne.s32 q, %2, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000;"
        " @q ld.global.cs.v2.f32 {%0, %1}, [%3]; }"
        : "=f"(a), "=f"(b) : "r"((int)wanted), "l"(p));
  } else {
    asm("{ .reg .pred q; setp.ne.s32 q, %2, 0; mov.f32 %0, 0f00000000; mov.f32 %1, 0f00000000;"
        " @q ld.global.v2.f32 {%0, %1}, [%3]; }"
        : "=f"(a), "=f"(b) : "r"((int)wanted), "l"(p));
  }
  return make_float2(a, b);
}

template <bool STREAM> __device__ __forceinline__ unsigned load_if(bool wanted, const unsigned* p) {
  unsigned a;
  asm("{ .reg .pred q; setp.ne.s32 q, %1, 0; mov.u32 %0, 0; @q ld.global.u32 %0, [%2]; }"
      : "=r"(a) : "r"((int)wanted), "l"(p));
  return a;
}

template <bool STREAM> __device__ __forceinline__ unsigned short load_if(bool wanted, const unsigned short* p) {
  unsigned short a;
  asm("{ .reg .pred q; setp.ne.s32 q, %1, 0; mov.u16 %0, 0; @q ld.global.u16 %0, [%2]; }"
      : "=h"(a) : "r"((int)wanted), "l"(p));
  return a;
}

__device__ __forceinline__ void store_if(bool wanted, float* p, float a) {
  asm volatile("{ .reg .pred q; setp.ne.s32 q, %0, 0; @q st.global.cs.f32 [%1], %2; }"
               ::"r"((int)wanted), "l"(p), "f"(a) : "memory");
}

__device__ __forceinline__ void store_if(bool wanted, float2* p, float2 a) {
  asm volatile("{ .reg .pred q; setp.ne.s32 q, %0, 0; @q st.global.cs.v2.f32 [%1], {%2, %3}; }"
               ::"r"((int)wanted), "l"(p), "f"(a.x), "f"(a.y) : "memory");
}

__device__ __forceinline__ void store_if(bool wanted, unsigned* p, unsigned a) {
  asm volatile("{ .reg .pred q; setp.ne.s32 q, %0, 0; @q st.global.cs.u32 [%1], %2; }"
               ::"r"((int)wanted), "l"(p), "r"(a) : "memory");
}

__device__ __forceinline__ void store_if(bool wanted, unsigned short* p, unsigned short a) {
  asm volatile("{ .reg .pred q; setp.ne.s32 q, %0, 0; @q st.global.cs.u16 [%1], %2; }"
               ::"r"((int)wanted), "l"(p), "h"(a) : "memory");
}
