// From spectra to windows of real signals; fft1d.cu says how.

struct ToElements {
  Real* x;
  Window window;
  float scale;
  bool exists;
  __device__ __forceinline__ void operator()(int j, float2 value) const {
    const bool has0 = exists && window.has(2 * j), has1 = exists && window.has(2 * j + 1);
    Real* p = x + window.at(2 * j);
    value = make_float2(scale * value.x, scale * value.y);
    if constexpr (VECTOR) {
      store_reals<true>(has0, p, value);
    } else {
      store_real<true>(has0, p, value.x);
      store_real<true>(has1, p + window.step, value.y);
    }
  }
};

struct FromShared {
  const float2* s;
  __device__ __forceinline__ float2 operator()(int k) const { return s[k]; }
};

extern "C" __global__ void BOUNDS irfft(const float2* __restrict__ y, Real* __restrict__ x, i64 signals, i64 inner,
                                        i64 y_outer, i64 y_inner, i64 y_step, i64 x_outer, i64 x_inner, i64 x_step,
                                        i64 length, i64 left, double scale) {
  extern __shared__ float4 shared[];
  const Seat me = seat();
  const unsigned number = first_signal() + me.slot;
  float2* s = (float2*)shared + me.slot * PITCH;
  if constexpr (LAYOUT == PLAIN) {
    float2* to = (float2*)shared;
    each_number(me, signals, inner, y_outer, y_inner, [&](int place, i64 at) { copy_async(to + place, y + at); });
    wait_copies();
    __syncwarp();
  }
  const float2* spectrum = y + begin(number, signals, inner, y_outer, y_inner).offset;
#pragma unroll
  for (int j = 0; j <= M / 2 / T; ++j) {
    const int k = j * T + me.t;
    if (k > M / 2) break;
    float2 a, b;
    if constexpr (LAYOUT == PLAIN) {
      a = s[k], b = s[M - k];
    } else {
      a = load_complex<true>(spectrum + y_step * k);
      b = LAYOUT == PACKED && k == 0 ? make_float2(a.y, 0.f) : load_complex<true>(spectrum + y_step * (M - k));
    }
    if (k == 0) a.y = b.y = 0.f;  // real for real signals
    const float2 even = make_float2(a.x + b.x, a.y - b.y), w = ROOTS[k];
    const float2 odd = times(make_float2(w.x, -w.y), make_float2(a.x - b.x, a.y + b.y));
    s[k] = make_float2(even.x - odd.y, even.y + odd.x);
    if (k) s[M - k] = make_float2(even.x + odd.y, odd.x - even.y);
  }
  __syncwarp();
  const Start to = begin(number, signals, inner, x_outer, x_inner);
  const Window window = {x_step, (int)length, (int)left};
  const ToElements put = {x + to.offset, window, (float)scale, to.exists};
  float2 c[COUNT][T];
  transform(FromShared{s}, s, me.t, c);
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (!has(me.t, i)) continue;
#pragma unroll
    for (int j = 0; j < T; ++j) put(me.t + T * i + R * j, c[i][j]);
  }
}
