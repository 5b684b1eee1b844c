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

// Reals, 0 unless ``wanted``. MASKED: whether that has to be looked at; STREAM: they are read once.
template <bool STREAM, bool MASKED, class T> __device__ __forceinline__ T load(bool wanted, const T* p) {
  if constexpr (MASKED) return load_if<STREAM>(wanted, p);
  else if constexpr (STREAM) return __ldcs(p);
  else return *p;
}

template <bool STREAM, bool MASKED> __device__ __forceinline__ float load_real(bool wanted, const Real* p) {
  return widen(load<STREAM, MASKED>(wanted, p));
}

// Two neighbours, the first at a multiple of their size.
template <bool STREAM, bool MASKED> __device__ __forceinline__ float2 load_reals(bool wanted, const Real* p) {
  if constexpr (REAL == 0) return load<STREAM, MASKED>(wanted, (const float2*)p);
  else {
    const unsigned both = load<STREAM, MASKED>(wanted, (const unsigned*)p);
    return make_float2(widen((unsigned short)both), widen((unsigned short)(both >> 16)));
  }
}

// STREAM_STORES: what is written need not stay in the cache.
template <class T> __device__ __forceinline__ void write(T* p, T value) {
  if constexpr (STREAM_STORES) __stcs(p, value);
  else *p = value;
}

template <bool MASKED, class T> __device__ __forceinline__ void store(bool wanted, T* p, T value) {
  if constexpr (MASKED) store_if<STREAM_STORES>(wanted, p, value);
  else write(p, value);
}

template <bool MASKED> __device__ __forceinline__ void store_real(bool wanted, Real* p, float value) {
  if constexpr (REAL == 0) store<MASKED>(wanted, (float*)p, value);
  else store<MASKED>(wanted, (unsigned short*)p, narrow(value));
}

template <bool MASKED> __device__ __forceinline__ void store_reals(bool wanted, Real* p, float2 value) {
  if constexpr (REAL == 0) store<MASKED>(wanted, (float2*)p, value);
  else store<MASKED>(wanted, (unsigned*)p, (unsigned)narrow(value.x) | (unsigned)narrow(value.y) << 16);
}

// Spectra are complex64, or fp16 parts of such numbers.
using Complex = float2;

// STREAM: read once.
template <bool STREAM> __device__ __forceinline__ float2 load_complex(const Complex* p) {
  if constexpr (STREAM) return __ldcs(p);
  else return *p;
}

__device__ __forceinline__ void store_complex(Complex* p, float2 value) { write(p, value); }

// One fp16 number, or with SPLIT two, ``apart`` from each other: what fp16 has of it, and what that lacks.
template <bool SPLIT> __device__ __forceinline__ void store_part(unsigned short* p, i64 apart, float value) {
  const unsigned short high = half_of_float(value);
  write(p, high);
  if constexpr (SPLIT) write(p + apart, half_of_float(value - float_of_half(high)));
}

// The power of two by which the spectra of planes of at most 2^spread numbers, none of a magnitude above that with these
// bits, stay below 2^15. ``_exponent`` in ``split_gemm.py`` is its equal.
__device__ __forceinline__ float scale_of(int peak, int spread) {
  const int exponent = 141 - (peak >> 23) - spread;
  return float_of((unsigned)(exponent > 126 ? 253 : exponent < -126 ? 1 : exponent + 127) << 23);
}

// Where plane or signal number ``wanted`` starts, and whether there is one. Beyond the last it is the last.
struct Start {
  i64 offset;
  bool exists;
};

__device__ __forceinline__ Start start(unsigned wanted, i64 count, i64 inner, i64 outer_stride, i64 inner_stride) {
  const unsigned last = (unsigned)(count - 1), number = wanted < last ? wanted : last;
  const unsigned outer = number / (unsigned)inner;
  return {outer * outer_stride + (number - outer * (unsigned)inner) * inner_stride, wanted <= last};
}

__device__ __forceinline__ float2 conjugate(float2 a) { return make_float2(a.x, -a.y); }
__device__ __forceinline__ float2 plus_times(float2 a, float f, float2 b) {
  return make_float2(fmaf(f, b.x, a.x), fmaf(f, b.y, a.y));
}

// The larger of ``a`` and the magnitude of ``b``, if that is finite.
__device__ __forceinline__ float larger(float a, float b) {
  const float c = fabsf(b);
  return c > a && c <= 3.402823466e38f ? c : a;
}
