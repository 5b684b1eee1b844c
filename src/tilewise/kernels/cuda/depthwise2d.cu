// Depthwise convolutions of small planes by 2-D Fourier transforms, all in one kernel: images are read once, results
// written once, and no spectrum of an image leaves the multiprocessor.
//
// What depthwise2d.py writes above this, all of it known when the kernel is compiled:
//   N1, N2            rows and columns of the transform, multiples of 4
//   SPLIT1, SPLIT2    threads that share one transform down a column (of N1 points) and along a row (of N2)
//   PLANES, THREADS   planes of a thread block, its threads
//   PITCH             complex numbers from one row to the next in shared memory, odd
//   RESULTS           sums of products that a thread makes of what it has of one row
//   CORRELATE         the product with a filter is one with its conjugate
//   WIDE              results are fp32 whatever the operands
//   A, B, C           windows: where the operands and the result lie in the N1 x N2 plane, and how far apart
//   forward1, forward2, rotate1, rotate2          codelets, and
//   inverse1, inverse2, unrotate1, unrotate2      those of the way back
//
// Forward, as in fft2d.cu: (1) a thread transforms two real columns as one complex column and separates them, which
// leaves N1/2 rows, row 0 with row N1/2 as its imaginary part; (2) through shared memory a thread gets a row. There it
// stays: the product and the transform back along the row are done in the same registers, so that a row is read and
// written in place and two barriers are all that a plane waits for. (3) Columns backwards. Only columns that hold data
// are transformed before the product, and only those that are kept after it.
//
// Strides and dilation are computed in full: an output gradient's elements lie ``stride`` apart among zeros, a filter's
// ``dilation``, and of what comes back only every so many rows and columns are kept. Columns between are not transformed.
//
// A plane is transformed by itself. Two images as one complex plane would save the separation, a few per cent, but what
// is not finite in one, and the rounding error of a large one, would reach the other.
//
// SPLIT 2: of the two threads one takes the even frequencies, one the odd ones. Forward each reads all points; back
// along a row, where neither has all frequencies, they exchange their halves of the sum.
//
// Shared memory holds complex numbers, those of a row's first columns of each pair and then of its second ones: with an
// odd pitch, neighbouring threads meet in no bank, along rows or down columns.

constexpr int ROWS = N1 / 2, M1 = N1 / SPLIT1, M2 = N2 / SPLIT2;
constexpr int PLANE = ROWS * PITCH;
// Of one plane. A filter's spectrum holds M2 numbers for each of them, thread after thread, then what SPLIT2 threads
// need for row 0.
constexpr int ROW_THREADS = ROWS * SPLIT2, SPECTRUM = M2 * ROW_THREADS + N2;

// H x W elements, the first at (TOP, LEFT), DOWN rows and ALONG columns apart. VECTOR: accessed two neighbours of a row at
// a time. Lanes and shared memory count elements, not columns of the basis.
template <int H_, int W_, int TOP_, int LEFT_, bool VECTOR_, int DOWN_ = 1, int ALONG_ = 1> struct Window {
  static constexpr int H = H_, W = W_, TOP = TOP_, LEFT = LEFT_, DOWN = DOWN_, ALONG = ALONG_, PAIRS = (W + 1) / 2;
  static constexpr bool VECTOR = VECTOR_;
  // Threads that take part 0 of a column's transform; in whole warps where there are enough.
  static constexpr int LANES = PLANES * PAIRS, WARPS = (LANES + 31) / 32 * 32;
  static constexpr int GROUP = SPLIT1 > 1 && SPLIT1 * WARPS <= THREADS ? WARPS : LANES;
  __device__ static constexpr bool has_row(int h) { return h >= TOP && h < TOP + H * DOWN && (h - TOP) % DOWN == 0; }
  __device__ static constexpr bool has_column(int w) {
    return w >= LEFT && w < LEFT + W * ALONG && (w - LEFT) % ALONG == 0;
  }
  // Columns of a pair: neighbours, or half the width apart, so that single accesses stay coalesced.
  __device__ static constexpr int column0(int lane) { return VECTOR ? 2 * lane : lane; }
  __device__ static constexpr int column1(int lane) { return VECTOR ? 2 * lane + 1 : lane + PAIRS; }
  // Where column w of the basis lies in a row of shared memory.
  __device__ static constexpr int place(int w) {
    const int element = (w - LEFT) / ALONG;
    return VECTOR ? element % 2 * PAIRS + element / 2 : element;
  }
};

struct Strides {
  i64 row, column;
};

// Which plane of the block, which pair of columns or row of it, and which part of that transform. ``works``: any at all.
struct Seat {
  int slot, lane, part;
  bool works;
};

template <class Win> __device__ __forceinline__ Seat column_seat() {
  const int t = threadIdx.x, part = t / Win::GROUP, rest = t - part * Win::GROUP;
  return {rest / Win::PAIRS, rest % Win::PAIRS, SPLIT1 > 1 ? part : 0, part < SPLIT1 && rest < Win::LANES};
}

// Threads of a warp that is not all idle do as the last ones do, but write nothing: exchanges need whole warps.
__device__ __forceinline__ Seat row_seat() {
  constexpr int all = PLANES * ROW_THREADS;
  const int mine = threadIdx.x, t = mine < all ? mine : all - SPLIT2 + mine % SPLIT2;
  const int slot = t / ROW_THREADS, rest = t - slot * ROW_THREADS;
  return {slot, rest / SPLIT2, rest % SPLIT2, mine < all};
}

__device__ __forceinline__ bool row_warp() {
  constexpr int whole = (PLANES * ROW_THREADS + 31) / 32 * 32;
  return THREADS == whole || (int)threadIdx.x < whole;
}

__device__ __forceinline__ float2 times(float2 a, float2 b) {
  return make_float2(fmaf(a.x, b.x, -a.y * b.y), fmaf(a.x, b.y, a.y * b.x));
}
__device__ __forceinline__ float2 add(float2 a, float2 b) { return make_float2(a.x + b.x, a.y + b.y); }
__device__ __forceinline__ float2 scaled(float f, float2 a) { return make_float2(f * a.x, f * a.y); }
// a times b or its conjugate, added to c
template <bool CONJUGATE> __device__ __forceinline__ float2 plus_product(float2 c, float2 a, float2 b) {
  if constexpr (CONJUGATE) b = conjugate(b);
  return make_float2(fmaf(a.x, b.x, fmaf(-a.y, b.y, c.x)), fmaf(a.x, b.y, fmaf(a.y, b.x, c.y)));
}

// Elements h of both columns of a pair, as one complex number; zero outside of the window.
template <class Win> struct Columns {
  const Real *first, *second;
  i64 row;
  bool has1;
  __device__ __forceinline__ float2 operator[](int h) const {
    constexpr bool stream = SPLIT1 == 1;  // with two threads a column, the second finds it in the cache
    if (!Win::has_row(h)) return make_float2(0.f, 0.f);
    const i64 offset = row * ((h - Win::TOP) / Win::DOWN);
    if constexpr (Win::VECTOR) return load_reals<stream, false>(true, first + offset);
    const float a = load_real<stream, false>(true, first + offset);
    return make_float2(a, load_real<stream, Win::W % 2 != 0>(has1, second + offset));
  }
};

// Frequencies PART, PART + SPLIT1, ... of one complex column into those of two real ones, twice them but for row 0.
template <class Win, int PART> __device__ __forceinline__ void separate(const float2 (&r)[M1], float2* s) {
#pragma unroll
  for (int i = 0; i < ROWS / SPLIT1; ++i) {
    const int k = SPLIT1 * i + PART;
    const float2 u = r[i], v = r[k == 0 ? M1 / 2 : M1 - i - 2 * PART / SPLIT1];
    s[k * PITCH] = k == 0 ? make_float2(u.x, v.x) : make_float2(u.x + v.x, u.y - v.y);
    s[k * PITCH + Win::PAIRS] = k == 0 ? make_float2(u.y, v.y) : make_float2(u.y + v.y, v.x - u.x);
  }
}

// Transforms of all columns of the block's planes, from memory to shared memory. ``offset(slot)``: where a plane starts.
template <class Win, class Offset>
__device__ __forceinline__ void columns_forward(const Real* x, Strides step, const Offset& offset, float2* shared) {
  const Seat me = column_seat<Win>();
  if (!me.works) return;
  const int w0 = Win::column0(me.lane), w1 = Win::column1(me.lane);
  const Real* first = x + offset(me.slot) + step.column * w0;
  const Columns<Win> z = {first, first + step.column * (w1 - w0), step.row, w1 < Win::W};
  float2 r[M1];
  float2* s = shared + me.slot * PLANE + me.lane;
  if constexpr (SPLIT1 == 1) {
#pragma unroll
    for (int h = 0; h < N1; ++h) r[h] = z[h];
    forward1(r);
    separate<Win, 0>(r, s);
  } else {
    const float sign = me.part ? -1.f : 1.f;
#pragma unroll
    for (int h = 0; h < M1; ++h) {
      if (Win::has_row(h + M1)) r[h] = Win::has_row(h) ? plus_times(z[h], sign, z[h + M1]) : scaled(sign, z[h + M1]);
      else r[h] = z[h];
    }
    if (me.part) rotate1(r);
    forward1(r);
    if (me.part) separate<Win, SPLIT1 - 1>(r, s);
    else separate<Win, 0>(r, s);
  }
}

// Frequencies part, part + SPLIT2, ... of a row in shared memory.
template <class Win> __device__ __forceinline__ void row_forward(const float2* s, int part, float2 (&r)[M2]) {
  const float sign = part ? -1.f : 1.f;
#pragma unroll
  for (int j = 0; j < M2; ++j) {
    const bool low = Win::has_column(j), high = SPLIT2 > 1 && Win::has_column(j + M2);
    r[j] = low ? s[Win::place(j)] : make_float2(0.f, 0.f);
    if (high) r[j] = low ? plus_times(r[j], sign, s[Win::place(j + M2)]) : scaled(sign, s[Win::place(j + M2)]);
  }
  if (SPLIT2 > 1 && part) rotate2(r);
  forward2(r);
}

template <class Win, int FIRST> __device__ __forceinline__ void put_row(const float2 (&r)[M2], float2* s) {
#pragma unroll
  for (int j = 0; j < M2; ++j)
    if (Win::has_column(FIRST + j)) s[Win::place(FIRST + j)] = r[j];
  if (FIRST == 0 && Win::W % 2) s[Win::W] = make_float2(0.f, 0.f);  // the last pair's second column
}

// Back, from the same frequencies to the columns of a window in shared memory, where the row came from.
template <class Win> __device__ __forceinline__ void row_inverse(float2 (&r)[M2], const Seat& me, float2* s) {
  inverse2(r);
  if constexpr (SPLIT2 > 1) {
    if (me.part) unrotate2(r);
    const float sign = me.part ? -1.f : 1.f;
#pragma unroll
    for (int j = 0; j < M2; ++j) {
      const float2 other = make_float2(__shfl_xor_sync(~0u, r[j].x, 1), __shfl_xor_sync(~0u, r[j].y, 1));
      r[j] = plus_times(other, sign, r[j]);
    }
    __syncwarp();  // the other thread has read this row
  }
  if (!me.works) return;
  if (SPLIT2 > 1 && me.part) put_row<Win, (SPLIT2 - 1) * M2>(r, s);
  else put_row<Win, 0>(r, s);
}

// Where frequency N2 - w is, if w is number i of PART's.
template <int PART> __device__ constexpr int mate(int i) { return PART ? M2 - 1 - i : i ? M2 - i : 0; }

// Row 0 is U + iV with the spectra U and V of two real rows. Its product with G and H, those of another such row, is
// U G + i V H: at w, z[w] sum + z*[-w] rest with the two numbers that this makes of that row's y[w] and y[-w].
__device__ __forceinline__ void halves(float2 y, float2 mirrored, float2& sum, float2& rest) {
  const float2 g = make_float2(y.x + mirrored.x, y.y - mirrored.y), h = make_float2(y.y + mirrored.y, mirrored.x - y.x);
  sum = make_float2(0.25f * (g.x + h.x), 0.25f * (g.y + h.y));
  rest = make_float2(0.25f * (g.x - h.x), 0.25f * (g.y - h.y));
}

// Of a row and a filter's, or with CONJUGATE its conjugate; both frequencies of a pair at once.
template <bool CONJUGATE>
__device__ __forceinline__ void pair_product(float2 a, float2 b, float2 sum, float2 rest, float2& low, float2& high) {
  const float2 zero = make_float2(0.f, 0.f);
  low = plus_product<CONJUGATE>(plus_product<CONJUGATE>(zero, a, sum), conjugate(b), rest);
  high = plus_product<!CONJUGATE>(plus_product<!CONJUGATE>(zero, b, sum), conjugate(a), rest);
}

// A thread's sum of products: of its part of a row in registers, or at ``s`` and so on in shared memory.
template <bool SHARED> struct Sum {
  float2 value[M2];
  __device__ __forceinline__ void clear(float2*) {
#pragma unroll
    for (int i = 0; i < M2; ++i) value[i] = make_float2(0.f, 0.f);
  }
  __device__ __forceinline__ float2& operator[](int i) { return value[i]; }
};
template <> struct Sum<true> {
  float2* value;
  __device__ __forceinline__ void clear(float2* s) {
    value = s;
#pragma unroll
    for (int i = 0; i < M2; ++i) value[i * PLANES * ROW_THREADS] = make_float2(0.f, 0.f);
  }
  __device__ __forceinline__ float2& operator[](int i) { return value[i * PLANES * ROW_THREADS]; }
};

// One complex column out of the half spectra of two real ones; with two threads, ``part`` is the parity of its rows.
template <class Win> __device__ __forceinline__ void unite(const float2* s, int part, float2 (&r)[M1]) {
  const auto pair = [&](int k, float2& low, float2& high) {
    const float2 a = s[k * PITCH], b = s[k * PITCH + Win::PAIRS];
    low = make_float2(a.x - b.y, a.y + b.x);
    high = make_float2(a.x + b.y, b.x - a.y);
  };
  const float2 a = s[0], b = s[Win::PAIRS];
  const float2 first = make_float2(a.x, b.x), middle = make_float2(a.y, b.y);
  if constexpr (SPLIT1 == 1) {
    r[0] = first;
    r[M1 / 2] = middle;
#pragma unroll
    for (int k = 1; k < M1 / 2; ++k) pair(k, r[k], r[M1 - k]);
  } else {
    const float sign = part ? -1.f : 1.f;
    r[0] = plus_times(first, sign, middle);
    float2 u, v, p, q;
#pragma unroll
    for (int k = 1; k < M1 / 2; ++k) {
      pair(k, u, v);
      pair(M1 - k, p, q);
      r[k] = plus_times(u, sign, q);
      r[M1 - k] = plus_times(p, sign, v);
    }
    pair(M1 / 2, u, v);
    r[M1 / 2] = plus_times(u, sign, v);
  }
}

// Columns of a window, from shared memory to memory. ``start(slot)``: where a plane starts and whether it exists.
template <class Win, class Where>
__device__ __forceinline__ void columns_inverse(const float2* shared, Result* y, Strides step, const Where& start) {
  const Seat me = column_seat<Win>();
  if (!me.works) return;
  if (SPLIT1 > 1 && Win::DOWN % 2 == 0 && (me.part + Win::TOP) % 2) return;  // its rows lie between those kept
  const Start to = start(me.slot);
  if (!to.exists) return;
  float2 r[M1];
  unite<Win>(shared + me.slot * PLANE + me.lane, me.part, r);
  if (SPLIT1 > 1 && me.part) unrotate1(r);
  inverse1(r);
  const int w0 = Win::column0(me.lane), w1 = Win::column1(me.lane);
  Result *first = y + to.offset + step.column * w0, *second = first + step.column * (w1 - w0);
#pragma unroll
  for (int i = 0; i < M1; ++i) {
    constexpr bool some = SPLIT1 > 1;  // one thread's rows are known when this is compiled
    const int h = SPLIT1 * i + me.part - Win::TOP;
    const bool row = (unsigned)h < (unsigned)(Win::H * Win::DOWN) && h % Win::DOWN == 0;
    if (!some && !row) continue;
    const i64 offset = step.row * (h / Win::DOWN);
    if constexpr (Win::VECTOR) {
      put<some>(row, first + offset, r[i]);
    } else {
      put<some>(row, first + offset, r[i].x);
      put<some || Win::W % 2 != 0>(row && w1 < Win::W, second + offset, r[i].y);
    }
  }
}
