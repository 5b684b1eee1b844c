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
//   STAGED            plain spectra are stored through shared memory, so that pieces of memory are long
//   SINGLE            signals are counted by one dimension
//   PEAKS             a macro: whether each block of a forward transform writes its largest finite magnitude
//   transform_r, transform_t    codelets of R and of T points
//   TURNS, ROOTS      exp(-+2 pi i t k / M) at k * T + t, and exp(-2 pi i k / N) for k up to M / 2
//   STEPS             exp(-2 pi i (T i + R j) / N) at i * T + j
//
// A real signal is a complex one of half as many elements, z[j] = x[2j] + i x[2j+1]. Its transform takes two factors,
// M = R T: every thread transforms R elements that lie T apart, rotates them, and after an exchange through shared
// memory transforms T at a time, of which it has every T-th of R. Then X[k] = E + exp(-2 pi i k / N) O, where E = (Z[k] + Z*[M-k]) / 2 and
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

// Whether thread t has an i-th transform of T numbers.
__device__ constexpr bool has(int t, int i) { return R % T == 0 || t + T * i < R; }

__device__ __forceinline__ Start begin(unsigned number, i64 signals, i64 inner, i64 outer_stride, i64 inner_stride) {
  if constexpr (!SINGLE) return start(number, signals, inner, outer_stride, inner_stride);
  const unsigned last = (unsigned)(signals - 1);
  return {(number < last ? number : last) * inner_stride, number <= last};
}

// The complex transform of z(0) .. z(M-1), shared by T threads: Z[t + T i + R j] as c[i][j] where t + T i < R. ``s``: the
// signal's shared memory, in which nothing is wanted any more.
template <class Load> __device__ __forceinline__ void transform(const Load& z, float2* s, int t, float2 (&c)[COUNT][T]) {
  float2 r[R];
#pragma unroll
  for (int j = 0; j < R; ++j) r[j] = z(j * T + t);
  if constexpr (T == 1) {
    transform_r(r);
#pragma unroll
    for (int k = 0; k < R; ++k) c[k][0] = r[k];
  } else {
    float2 turns[R];  // on their way while the elements are
#pragma unroll
    for (int k = 1; k < R; ++k) turns[k] = TURNS[k * T + t];
    transform_r(r);
    __syncwarp();
#pragma unroll
    for (int k = 0; k < R; ++k) s[t * ROW + k] = k ? times(r[k], turns[k]) : r[k];
    __syncwarp();
#pragma unroll
    for (int i = 0; i < COUNT; ++i) {
#pragma unroll
      for (int j = 0; j < T; ++j) c[i][j] = has(t, i) ? s[j * ROW + t + T * i] : make_float2(0.f, 0.f);
      transform_t(c[i]);
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
  if constexpr (FLAT) {
    if (first + IN_WARP <= signals) {
#pragma unroll 8
      for (int i = me.lane; i < IN_WARP * SIDE; i += 32) {
        const int slot = i / SIDE;
        visit((me.warp + slot) * PITCH + i - slot * SIDE, (i64)first * SIDE + i);
      }
      return;
    }
  }
#pragma unroll(FLAT ? 1 : 8)
  for (int i = me.lane; i < IN_WARP * SIDE; i += 32) {
    const int slot = i / SIDE, k = i - slot * SIDE;
    const Start to = begin(first + slot, signals, inner, y_outer, y_inner);
    if (to.exists) visit((me.warp + slot) * PITCH + k, to.offset + k);
  }
}
