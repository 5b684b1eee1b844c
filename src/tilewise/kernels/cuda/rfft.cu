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

// Z[M-k] for every k of this thread. With q = t + T i and k = q + R j, M - k is (R - q) + R (T-1-j): at place
// (R - t) / T - i of thread (R - t) mod T; only for q = 0 the thread has it itself.
__device__ __forceinline__ void mirror(const float2 (&c)[COUNT][T], float2 (&m)[COUNT][T], const Seat& me) {
  constexpr int Q = R / T;
  const int t = (R + T - me.t) % T, lane = SIGNALS_FIRST ? t * IN_WARP + me.lane % IN_WARP : me.lane / T * T + t;
  const bool early = t > R % T;  // the place that the other thread asks for is one less
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    constexpr int LAST = COUNT - 1;
    const int from = Q - i < 0 ? 0 : Q - i < LAST ? Q - i : LAST, before = Q - 1 - i < 0 ? 0 : Q - 1 - i;
#pragma unroll
    for (int j = 0; j < T; ++j) {
      const float2 a = c[from][T - 1 - j], b = c[before][T - 1 - j], own = c[0][(T - j) % T];
      m[i][j].x = __shfl_sync(~0u, early ? b.x : a.x, lane);
      m[i][j].y = __shfl_sync(~0u, early ? b.y : a.y, lane);
      if (i == 0 && me.t == 0) m[i][j] = own;
    }
  }
}

// The largest of the block's ``peak``, into ``peaks[block]``, as its bits.
__device__ __forceinline__ void store_peak(float peak, float* shared, int* peaks) {
#pragma unroll
  for (int other = 16; other; other /= 2) peak = larger(peak, __shfl_xor_sync(~0u, peak, other));
  __syncthreads();  // what lies there has been read
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = peak;
  __syncthreads();
  if (threadIdx.x > 0) return;
  for (int i = 1; i < THREADS / 32; ++i) peak = larger(peak, shared[i]);
  peaks[blockIdx.x] = (int)bits_of(peak);
}

// ``peaks``: one number of each block, the largest finite magnitude of its spectra's parts.
extern "C" __global__ void BOUNDS rfft(const Real* __restrict__ x, float2* __restrict__ y,
#if PEAKS
                                       int* __restrict__ peaks,
#endif
                                       i64 signals, i64 inner, i64 x_outer, i64 x_inner, i64 x_step, i64 length,
                                       i64 left, i64 y_outer, i64 y_inner, i64 y_step) {
  extern __shared__ float4 shared[];
  const Seat me = seat();
  const unsigned number = first_signal() + me.slot;
  float2* s = (float2*)shared + me.slot * PITCH;
  const Real* signal = x + begin(number, signals, inner, x_outer, x_inner).offset;
  const float2 base = T == 1 ? make_float2(1.f, 0.f) : ROOTS[me.t];
  float2 c[COUNT][T], m[COUNT][T];
  transform(Elements{signal, {x_step, (int)length, (int)left}}, s, me.t, c);
  if constexpr (T > 1) mirror(c, m, me);
  const Start to = begin(number, signals, inner, y_outer, y_inner);
  if constexpr (STAGED) __syncwarp();  // what lies there has been read
  else if (!PEAKS && !to.exists) return;
  float peak = 0.f;
  float2* spectrum = y + to.offset;
  const auto put = [&](int k, float2 value) {
    if constexpr (PEAKS) peak = larger(larger(peak, value.x), value.y);
    if constexpr (STAGED) s[k] = value;
    else if (!PEAKS || to.exists) store_complex(spectrum + y_step * k, value);
  };
#pragma unroll
  for (int i = 0; i < COUNT; ++i) {
    if (!has(me.t, i)) continue;
#pragma unroll
    for (int j = 0; j < T; ++j) {
      const float2 a = c[i][j], b = T == 1 ? c[i ? COUNT - i : 0][0] : m[i][j], step = STEPS[i * T + j];
      const float2 w = i || j ? T == 1 ? step : times(base, step) : base;
      const float2 even = make_float2(0.5f * (a.x + b.x), 0.5f * (a.y - b.y));
      const float2 odd = times(w, make_float2(0.5f * (a.y + b.y), 0.5f * (b.x - a.x)));
      float2 low = make_float2(even.x + odd.x, even.y + odd.y);
      if (i == 0 && j == 0 && me.t == 0) {
        const float last = even.x - odd.x;
        if constexpr (LAYOUT == PACKED) low.y = last;
        else put(M, make_float2(last, 0.f));
      }
      put(me.t + T * i + R * j, low);
    }
  }
  if constexpr (STAGED) {
    __syncwarp();
    const float2* from = (const float2*)shared;
    each_number(me, signals, inner, y_outer, y_inner, [&](int place, i64 at) { store_complex(y + at, from[place]); });
  }
#if PEAKS
  store_peak(peak, (float*)shared, peaks);
#endif
}
