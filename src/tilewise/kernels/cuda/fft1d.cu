// 1-D Fourier transforms of many short real signals of N elements, each way in one pass over memory.
//
// What fft1d.py writes above this, all of it known when the kernel is compiled:
//   N                 elements of a signal
//   T                 threads that share one, a power of two up to 16
//   SIGNALS, THREADS  signals of a thread block, its threads
//   PADDED, VECTOR, REAL    as for planes
//   SIGNALS_FIRST     neighbouring threads take neighbouring signals in memory, not elements
//   LAYOUT            of the spectrum: PLAIN, FREQUENCY_MAJOR or PACKED
//   FLAT              plain spectra follow each other without a gap
//   transform_r, transform_t    codelets of R and of T points
//   TURNS, ROOTS      exp(-+2 pi i t k / M) at k * T + t, and exp(-2 pi i k / N)
//
// A real signal is a complex one of half as many elements, z[j] = x[2j] + i x[2j+1]. Its transform takes two factors,
// M = R T: every thread transforms R elements that lie T apart, rotates them, and after an exchange through shared
// memory transforms T at a time. Then X[k] = E + exp(-2 pi i k / N) O, where E = (Z[k] + Z*[M-k]) / 2 and
// O = (Z[k] - Z*[M-k]) / 2i. All threads of a signal are in one warp, so that nothing waits for a whole block. Inverse:
// the same backwards.

constexpr int M = N / 2, R = M / T, COUNT = (R + T - 1) / T;
constexpr int SIDE = LAYOUT == PACKED ? M : M + 1;  // numbers of a spectrum
constexpr int IN_WARP = 32 / T;
// Shared memory of a signal: T rows of ROW numbers while exchanging, else the spectrum. With odd rows, and signals T
// numbers apart modulo all banks, no two of 16 neighbouring threads meet in a bank.
constexpr int ROW = R | 1, LEAST = T * ROW > M + 1 ? T * ROW : M + 1;
constexpr int PITCH = LEAST + (T - LEAST % 16 + 16) % 16;

__device__ __forceinline__ float2 times(float2 a, float2 b) {
  return make_float2(fmaf(a.x, b.x, -a.y * b.y), fmaf(a.x, b.y, a.y * b.x));
}

// Which signal of the block, and which of the T threads that share it. ``warp``: the first signal of this warp.
struct Seat {
  int slot, t, warp, lane;
};

__device__ __forceinline__ Seat seat() {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 * IN_WARP;
  if constexpr (SIGNALS_FIRST) return {warp + lane % IN_WARP, lane / IN_WARP, warp, lane};
  else return {warp + lane / T, lane % T, warp, lane};
}

__device__ __forceinline__ unsigned first_signal() { return blockIdx.x * (unsigned)SIGNALS; }

// The complex transform of z(0) .. z(M-1), shared by T threads: put(k, Z[k]). ``s``: the signal's shared memory.
template <class Load, class Put>
__device__ __forceinline__ void transform(const Load& z, float2* s, int t, const Put& put) {
  float2 r[R];
#pragma unroll
  for (int j = 0; j < R; ++j) r[j] = z(j * T + t);
  transform_r(r);
  if constexpr (T == 1) {
#pragma unroll
    for (int k = 0; k < R; ++k) put(k, r[k]);
  } else {
    __syncwarp();
#pragma unroll
    for (int k = 0; k < R; ++k) s[t * ROW + k] = k ? times(r[k], TURNS[k * T + t]) : r[k];
    __syncwarp();
    float2 c[COUNT][T];
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int k = t + T * i;
#pragma unroll
      for (int j = 0; j < T; ++j) c[i][j] = R % T == 0 || k < R ? s[j * ROW + k] : make_float2(0.f, 0.f);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
      const int k = t + T * i;
      transform_t(c[i]);
      if (R % T != 0 && k >= R) continue;
#pragma unroll
      for (int j = 0; j < T; ++j) put(k + R * j, c[i][j]);
    }
  }
}

// Two neighbouring elements of a signal, which lies at ``left`` among N; ``step`` in elements.
struct Window {
  i64 step;
  int length, left;
  __device__ __forceinline__ bool has(int i) const { return !PADDED || (unsigned)(i - left) < (unsigned)length; }
  __device__ __forceinline__ i64 at(int i) const { return PADDED ? step * (i - left) : step * i; }
};

// The spectra of this warp's signals, number by number: visit(place in shared memory, place in y).
template <class Visit>
__device__ __forceinline__ void each_number(const Seat& me, i64 signals, i64 inner, i64 y_outer, i64 y_inner,
                                            const Visit& visit) {
  const unsigned first = first_signal() + me.warp;
#pragma unroll 8
  for (int i = me.lane; i < IN_WARP * SIDE; i += 32) {
    const int slot = i / SIDE, k = i - slot * SIDE, place = (me.warp + slot) * PITCH + k;
    if constexpr (FLAT) {
      if (first + slot < signals) visit(place, (i64)first * SIDE + i);
    } else {
      const Start to = start(first + slot, signals, inner, y_outer, y_inner);
      if (to.exists) visit(place, to.offset + k);
    }
  }
}
