// From spectra to windows of real planes; fft2d.cu says how.
//
// With SUMMED the spectra lie nowhere: each of their numbers is the sum of so many products of numbers of two others, and is
// computed where it would be read. Then fft2d.py also writes:
//   CONJUGATED        the second factor's numbers are conjugated
//   TOGETHER          those of one sum lie next to each other in the second factor, as they always do in the first
//   WIDE_A, WIDE_B    they may be read 16 bytes at a time
// Neighbouring threads have neighbouring planes of one image, so that the first factor's numbers are read once for all of
// them and the second's in one piece. Neither is streamed: the cache keeps them for other planes and other images.

// One complex row or column out of the half spectra of two real ones. ``z.pair(k, low, high)`` gives its frequencies k
// and N-k, ``z.ends(low, high)`` 0 and N/2; with two threads, ``part`` is the parity of the places it gets.
template <int SPLIT, int M, class Source>
__device__ __forceinline__ void unite(float2 (&r)[M], const Source& z, int part) {
  float2 a, b;
  z.ends(a, b);
  if constexpr (SPLIT == 1) {
    r[0] = a;
    r[M / 2] = b;
#pragma unroll
    for (int k = 1; k < M / 2; ++k) z.pair(k, r[k], r[M - k]);
  } else {
    const float sign = part ? -1.f : 1.f;
    r[0] = plus_times(a, sign, b);
#pragma unroll
    for (int k = 1; k < M / 2; ++k) {
      float2 c, d;
      z.pair(k, a, b);
      z.pair(M - k, c, d);
      r[k] = plus_times(a, sign, d);
      r[M - k] = plus_times(c, sign, b);
    }
    z.pair(M / 2, a, b);
    r[M / 2] = plus_times(a, sign, b);
  }
}

// Every second number of a row, from ``part`` on: r[m] is number 2 m + part.
template <class Source> __device__ __forceinline__ void alternate(float2 (&r)[M2], const Source& z, int part) {
  constexpr int H = M2 / 2;
  float2 high[H];
  if (part) z.pair(1, r[0], high[0]);
  else z.ends(r[0], high[0]);
#pragma unroll
  for (int m = 1; m < H; ++m) z.pair(2 * m + part, r[m], high[m]);
#pragma unroll
  for (int j = 0; j < H; ++j) {
    const float2 odd = high[H - 1 - j], even = high[j ? H - j : 0];
    r[H + j] = part ? odd : even;
  }
}

// From transforms of the even numbers of a row, in one thread, and of the odd ones, in its neighbour: elements w and w + M2
// of the row for half of all w each, from part * M2 / 2 on. The odd one has rotated its.
__device__ __forceinline__ void combine(const float2 (&r)[M2], float2 (&low)[M2 / 2], float2 (&high)[M2 / 2], int part) {
#pragma unroll
  for (int w = 0; w < M2 / 2; ++w) {
    const float2 sent = part ? r[w] : r[w + M2 / 2], kept = part ? r[w + M2 / 2] : r[w];
    const float2 got = make_float2(__shfl_xor_sync(~0u, sent.x, 1), __shfl_xor_sync(~0u, sent.y, 1));
    const float2 a = part ? got : kept, b = part ? kept : got;
    low[w] = make_float2(a.x + b.x, a.y + b.y);
    high[w] = make_float2(a.x - b.x, a.y - b.y);
  }
}

// a + ib and its mirror image a* + ib*
__device__ __forceinline__ void join(float2 a, float2 b, float2& low, float2& high) {
  low = make_float2(a.x - b.y, a.y + b.x);
  high = make_float2(a.x + b.y, b.x - a.y);
}

// Row k of a Hermitian spectrum; ``edge``: row 0, with row N1/2 as its imaginary part. ``at.own(w)`` and ``at.mirrored(w)``
// are where its numbers are (see ``Rows``), ``get`` says what is there.
template <class At, class Get> struct SpectrumRow {
  At at;
  bool edge;
  Get get;
  __device__ __forceinline__ void pair(int w, float2& low, float2& high) const {
    const float2 u = get(at.own(w)), v = get(at.mirrored(w));
    join(u, v, low, high);
    if (!edge) low = u, high = LAYOUT == PACKED ? v : conjugate(v);
  }
  // The imaginary parts of what is real for real data do not count: the mean of what symmetry says twice is taken.
  __device__ __forceinline__ void ends(float2& low, float2& high) const {
    if constexpr (LAYOUT == PACKED) {
      const float2 u = get(at.own(0)), v = get(edge ? at.mirrored(0) : at.own(COLUMNS));
      low = edge ? make_float2(u.x, v.x) : u;
      high = edge ? make_float2(u.y, v.y) : v;
    } else {
      low = mean(get(at.own(0)), get(at.mirrored(0)));
      high = mean(get(at.own(COLUMNS)), get(at.mirrored(COLUMNS)));
    }
  }
  __device__ __forceinline__ float2 mean(float2 u, float2 v) const {
    return edge ? make_float2(u.x, v.x) : make_float2(0.5f * (u.x + v.x), 0.5f * (u.y - v.y));
  }
};

// A column of pairs of half spectra, in shared memory.
struct PairColumn {
  const float4* s;
  __device__ __forceinline__ void pair(int k, float2& low, float2& high) const {
    const float4 v = s[k * PITCH];
    join(make_float2(v.x, v.y), make_float2(v.z, v.w), low, high);
  }
  __device__ __forceinline__ void ends(float2& low, float2& high) const {
    const float4 v = s[0];
    low = make_float2(v.x, v.z);
    high = make_float2(v.y, v.w);
  }
};

template <class Source> __device__ __forceinline__ void take_row(float2 (&r)[M2], const Source& z, int part) {
  if constexpr (SPLIT2 == 1) unite<1>(r, z, 0);
  else alternate(r, z, part);
}

// A transformed row, as pairs of columns, to those that have the columns.
__device__ __forceinline__ void put_row(float2 (&r)[M2], const Everywhere<float4>& s, int part, bool works) {
  constexpr int H = HELD_COLUMNS;
  if constexpr (SPLIT2 == 1) {
#pragma unroll
    for (int l = 0; l < COLUMNS; ++l) {
      const float2 a = r[column0(l)], b = r[column1(l)];
      if (works) s.store(l / H, l % H, make_float4(a.x, a.y, b.x, b.y));
    }
  } else {
    float2 low[M2 / 2], high[M2 / 2];
    if (part == 1) rotate2(r);
    combine(r, low, high, part);
    if (!works) return;
#pragma unroll
    for (int i = 0; i < M2 / 2; ++i) {  // columns i, or neighbouring columns 2 i of the lower or the upper half
      const int l = !VECTOR ? i : i < M2 / 4 ? i : M2 / 2 + i - M2 / 4, other = l + (VECTOR ? M2 / 4 : M2 / 2);
      const float2 a = !VECTOR ? low[i] : i < M2 / 4 ? low[2 * i % (M2 / 2)] : high[2 * i % (M2 / 2)];
      const float2 b = !VECTOR ? high[i] : i < M2 / 4 ? low[2 * i % (M2 / 2) + 1] : high[2 * i % (M2 / 2) + 1];
      s.store(part == 1, l / H, l % H, other / H, other % H, make_float4(a.x, a.y, b.x, b.y));
    }
  }
}

#if SUMMED
// Where the numbers that make one number are.
struct Factors {
  const float2 *a, *b;
};

struct FactorRows {
  Rows<const float2> a, b;
  __device__ __forceinline__ Factors own(int w) const { return {a.own(w), b.own(w)}; }
  __device__ __forceinline__ Factors mirrored(int w) const { return {a.mirrored(w), b.mirrored(w)}; }
};

template <bool WIDE> __device__ __forceinline__ void load_factor(float2 (&r)[SUMMED], const float2* p, i64 step) {
  if constexpr (WIDE) {
#pragma unroll
    for (int i = 0; i < SUMMED / 2; ++i) {
      const float4 both = __ldg((const float4*)p + i);
      r[2 * i] = make_float2(both.x, both.y);
      r[2 * i + 1] = make_float2(both.z, both.w);
    }
  } else {
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) r[i] = __ldg(p + i * step);
  }
}

struct SumOfProducts {
  i64 step;  // from one of the second factor's numbers to the next
  __device__ __forceinline__ float2 operator()(const Factors& at) const {
    float2 a[SUMMED], b[SUMMED];
    load_factor<WIDE_A>(a, at.a, 1);
    load_factor<WIDE_B>(b, at.b, TOGETHER ? 1 : step);
    float2 sum = make_float2(0.f, 0.f);
#pragma unroll
    for (int i = 0; i < SUMMED; ++i) {
      const float y = CONJUGATED ? -b[i].y : b[i].y;
      sum = make_float2(fmaf(a[i].x, b[i].x, sum.x), fmaf(a[i].x, y, sum.y));
      sum = make_float2(fmaf(-a[i].y, y, sum.x), fmaf(a[i].y, b[i].x, sum.y));
    }
    return sum;
  }
};

// ``inner`` planes of each image; each ``columns`` of them are of one group, and plane n of that goes with ``b_column`` n.
#define SPECTRA const float2 *__restrict__ a, const float2* __restrict__ b
#define SPECTRA_STEPS                                                                                              \
  i64 columns, i64 a_image, i64 a_group, i64 a_frequency, i64 b_group, i64 b_column, i64 b_frequency, i64 b_step
#else
struct FromShared {
  __device__ __forceinline__ float2 operator()(const float2* p) const { return *p; }
};
struct FromMemory {  // with two threads a row, the second finds it in the cache
  __device__ __forceinline__ float2 operator()(const float2* p) const { return load_complex<SPLIT2 == 1>(p); }
};

#define SPECTRA const float2* __restrict__ y
#define SPECTRA_STEPS i64 y_outer, i64 y_inner, i64 y_frequency
#endif

extern "C" __global__ void BOUNDS irfft2(SPECTRA, Real* __restrict__ x, i64 planes, i64 inner, SPECTRA_STEPS, i64 x_outer,
                                         i64 x_inner, i64 x_row, i64 x_column, i64 height, i64 width, i64 top, i64 left,
                                         double scale) {
  float4* const shared = shared_memory();
  if constexpr (CLUSTER > 1) exchange();  // the others have started
  const Place p = place<ROWS, SPECTRUM_PLANES_FIRST, SPLIT2 == 2>();
  const bool works = all_work(ROWS, SPLIT2) || p.part < SPLIT2;
  float2 r[M2];
#if SUMMED
  if (works) {
    const unsigned wanted = first_plane() + p.slot, last = (unsigned)(planes - 1), plane = wanted < last ? wanted : last;
    const unsigned which = plane / (unsigned)inner, channel = plane - which * (unsigned)inner;
    const unsigned group = channel / (unsigned)columns, column = channel - group * (unsigned)columns;
    const Rows<const float2> first(a + (which * a_image + group * a_group), p.lane, a_frequency);
    const Rows<const float2> second(b + (group * b_group + column * b_column), p.lane, b_frequency);
    const SumOfProducts sum = {b_step};
    take_row(r, SpectrumRow<FactorRows, SumOfProducts>{{first, second}, p.lane == 0, sum}, p.part);
  }
#else
  if constexpr (LAYOUT == PLAIN) {
    const int slot = threadIdx.x / EACH, lane = threadIdx.x % EACH;
    const Piece* from = (const Piece*)(y + start(first_plane() + slot, planes, inner, y_outer, y_inner).offset);
    Piece* to = (Piece*)(shared + slot * PLANE);
#pragma unroll 8
    for (int i = lane; i < PIECES && slot < PLANES; i += EACH) copy_async(to + i, from + i);
    wait_copies();
    synchronize();
    const Rows<const float2> rows((const float2*)(shared + p.slot * PLANE), p.lane, 1);
    if (works) take_row(r, SpectrumRow<Rows<const float2>, FromShared>{rows, p.lane == 0, {}}, p.part);
    synchronize();
  } else if (works) {
    const float2* from = y + start(first_plane() + p.slot, planes, inner, y_outer, y_inner).offset;
    const Rows<const float2> rows(from, p.lane, y_frequency);
    take_row(r, SpectrumRow<Rows<const float2>, FromMemory>{rows, p.lane == 0, {}}, p.part);
  }
#endif
  if (works) transform2(r);
  put_row(r, Everywhere<float4>(shared + p.slot * PLANE + p.lane * PITCH), p.part, works);
  exchange();

  const Place c = place<COLUMNS, IMAGE_PLANES_FIRST>();
  const Start to = start(first_plane() + c.slot, planes, inner, x_outer, x_inner);
  if (!to.exists || (!all_work(COLUMNS, SPLIT1) && c.part >= SPLIT1)) return;
  float2 z[M1];
  unite<SPLIT1>(z, PairColumn{shared + c.slot * PLANE + c.held}, c.part);
  if (SPLIT1 == 2 && c.part) rotate1(z);
  transform1(z);
  const Window window = {x_row, x_column, (int)height, (int)width, (int)top, (int)left};
  const int w0 = column0(c.lane), w1 = column1(c.lane);
  const bool has0 = window.has_column(w0), has1 = window.has_column(w1);
  Real *first = x + to.offset + window.above(w0), *second = x + to.offset + window.above(w1);
  const float factor = (float)scale;
#pragma unroll
  for (int i = 0; i < M1; ++i) {
    const int h = SPLIT1 * i + c.part;
    const bool row = window.has_row(h);
    const i64 offset = window.row * h;
    const float2 value = make_float2(factor * z[i].x, factor * z[i].y);
    if constexpr (VECTOR) {
      store_reals<PADDED>(has0 && row, first + offset, value);
    } else {
      store_real<PADDED>(has0 && row, first + offset, value.x);
      store_real<PADDED>(has1 && row, second + offset, value.y);
    }
  }
}
