// From real signals to their spectra; fft1d.cu says how.

struct Elements {
  const Real* x;
  Window window;
  __device__ __forceinline__ float2 operator()(int j) const {
    const bool has0 = window.has(2 * j), has1 = window.has(2 * j + 1);
    const Real* p = x + window.at(2 * j);
    if constexpr (VECTOR) return load_reals<true, PADDED>(has0, p);
    const float a = load_real<true, PADDED>(has0, p);
    return make_float2(a, load_real<true, PADDED>(has1, p + window.step));
  }
};

struct ToShared {
  float2* s;
  __device__ __forceinline__ void operator()(int k, float2 value) const { s[k] = value; }
};

extern "C" __global__ void BOUNDS rfft(const Real* __restrict__ x, float2* __restrict__ y, i64 signals, i64 inner,
                                       i64 x_outer, i64 x_inner, i64 x_step, i64 length, i64 left, i64 y_outer,
                                       i64 y_inner, i64 y_step) {
  extern __shared__ float4 shared[];
  const Seat me = seat();
  const unsigned number = first_signal() + me.slot;
  float2* s = (float2*)shared + me.slot * PITCH;
  const Real* signal = x + start(number, signals, inner, x_outer, x_inner).offset;
  transform(Elements{signal, {x_step, (int)length, (int)left}}, s, me.t, ToShared{s});
  __syncwarp();
  const Start to = start(number, signals, inner, y_outer, y_inner);
  float2* spectrum = y + to.offset;
#pragma unroll
  for (int j = 0; j <= M / 2 / T; ++j) {
    const int k = j * T + me.t;
    if (k > M / 2) break;
    const float2 a = s[k], b = s[k ? M - k : 0], w = ROOTS[k];
    const float2 even = make_float2(0.5f * (a.x + b.x), 0.5f * (a.y - b.y));
    const float2 odd = times(w, make_float2(0.5f * (a.y + b.y), 0.5f * (b.x - a.x)));
    float2 low = make_float2(even.x + odd.x, even.y + odd.y);
    const float2 high = make_float2(even.x - odd.x, odd.y - even.y);
    const bool real = LAYOUT == PACKED && k == 0;
    if (real) low.y = high.x;
    if constexpr (LAYOUT == PLAIN) {
      s[k] = low;
      s[M - k] = high;
    } else if (to.exists) {
      store_complex(spectrum + y_step * k, low);
      if (!real) store_complex(spectrum + y_step * (M - k), high);
    }
  }
  if constexpr (LAYOUT == PLAIN) {
    __syncwarp();
    const float2* from = (const float2*)shared;
    each_number(me, signals, inner, y_outer, y_inner, [&](int place, i64 at) { store_complex(y + at, from[place]); });
  }
}
