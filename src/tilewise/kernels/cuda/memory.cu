// Access to device memory: the types of reals and of spectra, streaming hints. Comes before every kernel, after ptx.cu.
//
// REAL is 0 for fp32, 1 for fp16, 2 for bf16. Half precision is kept as its bits.

using i64 = long long;

template <int KIND> struct Reals { using type = unsigned short; };
template <> struct Reals<0> { using type = float; };
using Real = typename Reals<REAL>::type;

__device__ __forceinline__ float widen(float value) { return value; }

__device__ __forceinline__ float widen(unsigned short bits) {
  return REAL == 2 ? float_of_bfloat16(bits) : float_of_half(bits);
}
__device__ __forceinline__ unsigned short narrow(float value) {
  return REAL == 2 ? bfloat16_of_float(value) : half_of_float(value);
}

// STREAM: read once, so the cache need not keep it.
template <bool STREAM, class T> __device__ __forceinline__ T load(const T* p) {
  if constexpr (STREAM) return __ldcs(p);
  else return *p;
}

template <bool STREAM> __device__ __forceinline__ float load_real(const Real* p) { return widen(load<STREAM>(p)); }

// Two neighbours, the first at a multiple of their size.
template <bool STREAM> __device__ __forceinline__ float2 load_reals(const Real* p) {
  if constexpr (REAL == 0) return load<STREAM>((const float2*)p);
  else {
    const unsigned both = load<STREAM>((const unsigned*)p);
    return make_float2(widen((unsigned short)both), widen((unsigned short)(both >> 16)));
  }
}

__device__ __forceinline__ void store_real(Real* p, float value) {
  if constexpr (REAL == 0) __stcs((float*)p, value);
  else __stcs((unsigned short*)p, narrow(value));
}

__device__ __forceinline__ void store_reals(Real* p, float first, float second) {
  if constexpr (REAL == 0) __stcs((float2*)p, make_float2(first, second));
  else __stcs((unsigned*)p, (unsigned)narrow(first) | (unsigned)narrow(second) << 16);
}

// Spectra are complex64. Half-precision spectra would be two more versions of these.
using Complex = float2;

__device__ __forceinline__ float2 load_complex(const Complex* p) { return __ldcs(p); }

__device__ __forceinline__ void store_complex(Complex* p, float2 value) { __stcs(p, value); }
