// The type of results and how they are stored. WIDE: they are fp32 whatever the operands.

template <bool FP32> struct Results { using type = Real; };
template <> struct Results<true> { using type = float; };
using Result = Results<(WIDE != 0)>::type;

// MASKED: only if ``wanted``.
template <bool MASKED> __device__ __forceinline__ void put(bool wanted, float* p, float value) {
  store<MASKED>(wanted, p, value);
}
template <bool MASKED> __device__ __forceinline__ void put(bool wanted, unsigned short* p, float value) {
  store<MASKED>(wanted, p, narrow(value));
}

// Two neighbours, the first at a multiple of their size.
template <bool MASKED> __device__ __forceinline__ void put(bool wanted, float* p, float2 value) {
  store<MASKED>(wanted, (float2*)p, value);
}
template <bool MASKED> __device__ __forceinline__ void put(bool wanted, unsigned short* p, float2 value) {
  store<MASKED>(wanted, (unsigned*)p, (unsigned)narrow(value.x) | (unsigned)narrow(value.y) << 16);
}
