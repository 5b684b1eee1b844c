// The type of results and how they are stored. WIDE: they are fp32 whatever the operands.

template <bool FP32> struct Results { using type = Real; };
template <> struct Results<true> { using type = float; };
using Result = Results<(WIDE != 0)>::type;

__device__ __forceinline__ void put(float* p, float value) { write(p, value); }
__device__ __forceinline__ void put(unsigned short* p, float value) { write(p, narrow(value)); }
__device__ __forceinline__ void put(float* p, float2 value) { write((float2*)p, value); }
__device__ __forceinline__ void put(unsigned short* p, float2 value) {
  write((unsigned*)p, (unsigned)narrow(value.x) | (unsigned)narrow(value.y) << 16);
}
